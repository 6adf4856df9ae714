// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"time"
)

// encode writes what json.Marshal would, byte for byte, behind its header. An Allocate comes seldom enough to find nothing of
// it in the processor's caches, and reflection then takes a third of the ledger's part in the answer.
func (r record) encode() ([]byte, error) {
	body := make([]byte, 0, 512)
	for _, field := range []struct{ key, value string }{
		{`{"kind":`, string(r.Kind)}, {`,"holder":`, r.Holder}, {`,"device":`, r.Device},
	} {
		body = appendString(append(body, field.key...), field.value)
	}
	body = appendUnlessZero(body, `,"shareBytes":`, r.ShareBytes)
	body = appendUnlessZero(body, `,"shareOf":`, r.ShareOf)
	body = appendString(append(body, `,"state":`...), string(r.State))
	since, err := appendTime(append(body, `,"since":`...), r.Since)
	if err != nil {
		return nil, err
	}
	body = appendString(append(since, `,"bootID":`...), r.BootID)
	body = appendUnlessEmpty(body, `,"resource":`, r.Resource)
	body = appendUnlessEmpty(body, `,"namespace":`, r.Namespace)
	body = appendUnlessEmpty(body, `,"name":`, r.Name)
	for i, pod := range r.Pods {
		if i == 0 {
			body = append(body, `,"pods":[`...)
		} else {
			body = append(body, ',')
		}
		body = appendString(append(body, `{"uid":`...), pod.UID)
		body = appendUnlessEmpty(body, `,"namespace":`, pod.Namespace)
		body = append(appendUnlessEmpty(body, `,"name":`, pod.Name), '}')
		if i == len(r.Pods)-1 {
			body = append(body, ']')
		}
	}
	body = append(strconv.AppendUint(append(body, `,"generation":`...), r.Generation, 10), '}')
	return append(header(r.version(), body), body...), nil
}

func (r record) version() int64 {
	if r.ShareOf > 0 {
		return recordVersion
	}
	return wholeVersion
}

// header is the first line of a record, with room for one page behind it.
func header(version int64, body []byte) []byte {
	sum := strconv.FormatUint(uint64(crc32.Checksum(body, castagnoli)), 16)
	line := append(make([]byte, 0, spareSize), "tandem-hold v"...)
	line = append(strconv.AppendInt(line, version, 10), " crc32c="...)
	line = append(append(line, "00000000"[len(sum):]...), sum...)
	return append(strconv.AppendInt(append(line, " len="...), int64(len(body)), 10), '\n')
}

func appendUnlessEmpty(to []byte, key, value string) []byte {
	if value == "" {
		return to
	}
	return appendString(append(to, key...), value)
}

func appendUnlessZero(to []byte, key string, n uint64) []byte {
	if n == 0 {
		return to
	}
	return strconv.AppendUint(append(to, key...), n, 10)
}

// appendString leaves to encoding/json what it would escape.
func appendString(to []byte, s string) []byte {
	if strings.IndexFunc(s, escaped) >= 0 {
		if quoted, err := json.Marshal(s); err == nil { // it always is
			return append(to, quoted...)
		}
	}
	return append(append(append(to, '"'), s...), '"')
}

// escaped covers all that encoding/json escapes in a string, and more.
func escaped(r rune) bool {
	return r < ' ' || r > '~' || r == '"' || r == '\\' || r == '<' || r == '>' || r == '&'
}

func appendTime(to []byte, t time.Time) ([]byte, error) {
	if year := t.Year(); year < 0 || year > 9999 {
		return nil, fmt.Errorf("encode time: year %d", year)
	}
	return append(t.AppendFormat(append(to, '"'), time.RFC3339Nano), '"'), nil
}
