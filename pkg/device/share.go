// SPDX-License-Identifier: Apache-2.0

package device

import "fmt"

// Share is a part of a device that a holder has beside others: so much of its memory. The zero Share is the whole device. It is
// comparable.
type Share struct {
	// Bytes of memory that the holder may use, of the Of bytes that the device has. Shares of different wholes cannot be added up.
	Bytes, Of uint64
}

// ShareUnit is the unit of memory shares: the smallest request, and what requests are rounded up to.
const ShareUnit = 1 << 20

// ShareOf returns a share of bytes of a device with that memory. It returns the whole device if less than one ShareUnit would be
// left, because the scheduler allocates no smaller share.
func ShareOf(bytes, memory uint64) Share {
	if bytes+ShareUnit > memory {
		return Share{}
	}
	return Share{Bytes: bytes, Of: memory}
}

// Replica is one of n equal shares of a device, in whole MiB where there are enough; the whole device for fewer than two.
func Replica(memory uint64, n int) Share {
	switch count := uint64(max(n, 0)); {
	case count < 2:
		return Share{}
	case memory < count*ShareUnit:
		// Its memory is not known: the shares stand for themselves.
		return Share{Bytes: ShareUnit, Of: count * ShareUnit}
	default:
		return Share{Bytes: memory / count / ShareUnit * ShareUnit, Of: memory}
	}
}

// Whole reports whether it is all of the device.
func (s Share) Whole() bool { return s == Share{} }

// String is "10240Mi of 24564Mi", or "all".
func (s Share) String() string {
	if s.Whole() {
		return "all"
	}
	return fmt.Sprintf("%dMi of %dMi", s.Bytes/ShareUnit, s.Of/ShareUnit)
}
