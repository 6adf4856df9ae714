// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"os"
	"testing"
)

// Each operation costs the same however much is held. The directory is a tmpfs, as on a node.
func BenchmarkLedger(b *testing.B) {
	for _, held := range []int{0, 200} {
		dir, err := os.MkdirTemp("/dev/shm", "ledger")
		if err != nil {
			dir = b.TempDir()
		}
		b.Cleanup(func() { _ = os.RemoveAll(dir) })
		l, err := Open(b.Context(), Options{Dir: dir, BootID: "boot", PodStates: judge(func(Hold) PodState { return Gone })})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = l.Close() })
		check := func(b *testing.B, err error) {
			if err != nil {
				b.Fatal(err)
			}
		}
		for i := range held / 2 {
			check(b, second(l.ReserveClaim(b.Context(), claimOf(fmt.Sprint("held-", i), whole(fmt.Sprint("claimed-", i))))))
			check(b, l.ReservePod(limitsOf(fmt.Sprint("limited-", i))))
		}
		b.Run(fmt.Sprintf("reserve and drain claim/held=%d", held), func(b *testing.B) {
			for b.Loop() {
				check(b, second(l.ReserveClaim(b.Context(), claimOf("c", whole("a")))))
				check(b, l.DrainClaim(b.Context(), "c"))
			}
		})
		b.Run(fmt.Sprintf("repeat claim/held=%d", held), func(b *testing.B) {
			check(b, second(l.ReserveClaim(b.Context(), claimOf("c", whole("a")))))
			for b.Loop() {
				check(b, second(l.ReserveClaim(b.Context(), claimOf("c", whole("a")))))
			}
			check(b, l.DrainClaim(b.Context(), "c"))
		})
		b.Run(fmt.Sprintf("reserve and release limit/held=%d", held), func(b *testing.B) {
			requests := limitsOf("a")
			for b.Loop() {
				check(b, l.ReservePod(requests))
				l.mu.Lock()
				h := *l.holds[key{Holder{KindPod, "a"}, whole("a")}]
				l.mu.Unlock()
				check(b, l.Release(h))
			}
		})
	}
}
