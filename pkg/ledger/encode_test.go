// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"
)

// TestEncodeIsJSON: a record has the bytes that encoding/json and fmt give it, whatever strings it is made of.
func TestEncodeIsJSON(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	alphabet := []rune("aZ09-_./~ \"\\<>&\n\t\x00\x7f\u2028é世\U0001f600\uFFFD")
	text := func() string {
		word := make([]rune, random.IntN(12))
		for i := range word {
			word[i] = alphabet[random.IntN(len(alphabet))]
		}
		if random.IntN(10) == 0 {
			return string(word) + "\xff" // no UTF-8
		}
		return string(word)
	}
	zones := []*time.Location{time.UTC, time.FixedZone("", 5400), time.FixedZone("", -3600)}
	for range 20000 {
		r := record{
			Kind: Kind(text()), Holder: text(), Device: text(), State: State(text()), BootID: text(),
			Since:    time.Unix(random.Int64N(4e9), random.Int64N(2)*random.Int64N(1e9)).In(zones[random.IntN(len(zones))]),
			Resource: text(), Namespace: text(), Name: text(), Generation: random.Uint64(),
		}
		version := wholeVersion
		if random.IntN(2) == 0 {
			r.ShareBytes, r.ShareOf, version = random.Uint64(), random.Uint64(), recordVersion
		}
		for range random.IntN(4) {
			r.Pods = append(r.Pods, Pod{UID: text(), Namespace: text(), Name: text()})
		}
		got, err := r.encode()
		if err != nil {
			t.Fatal(err)
		}
		body, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf(recordHeader, version, crc32.Checksum(body, castagnoli), len(body)) + string(body)
		if string(got) != want {
			t.Fatalf("%+v is encoded as\n%s\nwant\n%s", r, got, want)
		}
	}
	if _, err := (record{Since: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}).encode(); err == nil {
		t.Error("a time that JSON cannot have is accepted")
	}
}
