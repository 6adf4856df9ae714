// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"net/url"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// A record is one hold on disk. Its file name carries the core (kind, holder, device), which never changes meaning, so
// that a record that cannot be read still holds. The first line of its contents is
//
//	tandem-hold v<version> crc32c=<8 hex digits> len=<bytes of JSON>
//
// then the JSON. Bytes behind it are padding. A record of a share has version 2: a reader of version 1 takes it for what it can
// read of it, a hold of the whole device, and leaves it as it is.
const (
	wholeVersion  = 1
	recordVersion = 2
	recordMagic   = "tandem-hold v%d "
	recordHeader  = recordMagic + "crc32c=%08x len=%d\n"
	nameSeparator = "~"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type record struct {
	Kind   Kind   `json:"kind"`
	Holder string `json:"holder"`
	Device string `json:"device"`
	// ShareBytes of the ShareOf bytes of the device; absent for all of it.
	ShareBytes uint64    `json:"shareBytes,omitempty"`
	ShareOf    uint64    `json:"shareOf,omitempty"`
	State      State     `json:"state"`
	Since      time.Time `json:"since"`
	BootID     string    `json:"bootID"`
	Resource   string    `json:"resource,omitempty"`
	Namespace  string    `json:"namespace,omitempty"`
	Name       string    `json:"name,omitempty"`
	Pods       []Pod     `json:"pods,omitempty"`
	Generation uint64    `json:"generation"`
}

// recordName is the inverse of parseRecordName, which takes no other spelling and any kind: what a newer version calls a
// holder holds as well.
func recordName(holder Holder, ref device.Ref) string {
	return strings.Join([]string{string(holder.Kind), escape(holder.ID), escape(ref.String())}, nameSeparator)
}

func escape(s string) string { return strings.ReplaceAll(url.PathEscape(s), nameSeparator, "%7E") }

func parseRecordName(name string) (Holder, device.Ref, error) {
	parts := strings.Split(name, nameSeparator)
	if len(parts) != 3 {
		return Holder{}, device.Ref{}, fmt.Errorf("parse record name %q: want <kind>~<holder>~<device>", name)
	}
	id, err := url.PathUnescape(parts[1])
	if err != nil || id == "" {
		return Holder{}, device.Ref{}, fmt.Errorf("parse record name %q: bad holder %q", name, parts[1])
	}
	text, err := url.PathUnescape(parts[2])
	if err != nil {
		return Holder{}, device.Ref{}, fmt.Errorf("parse record name %q: bad device %q", name, parts[2])
	}
	ref, err := device.ParseRef(text)
	if err != nil {
		return Holder{}, device.Ref{}, fmt.Errorf("parse record name %q: %w", name, err)
	}
	holder := Holder{Kind: Kind(parts[0]), ID: id}
	if holder.Kind == "" || recordName(holder, ref) != name {
		return Holder{}, device.Ref{}, fmt.Errorf("parse record name %q: not as a ledger writes it", name)
	}
	return holder, ref, nil
}

func encodeRecord(h Hold, bootID string) ([]byte, error) {
	name := recordName(h.Holder, h.Device)
	if holder, ref, err := parseRecordName(name); err != nil || holder != h.Holder || ref != h.Device {
		return nil, fmt.Errorf("encode record of %s: the name would not be read back as %#v", name, h.Device)
	}
	r := record{
		Kind: h.Holder.Kind, Holder: h.Holder.ID, Device: h.Device.String(), ShareBytes: h.Share.Bytes, ShareOf: h.Share.Of, State: h.State, Since: h.Since, BootID: bootID,
		Resource: h.Resource, Namespace: h.Namespace, Name: h.Name, Pods: h.Pods, Generation: h.Generation,
	}
	data, err := r.encode()
	if err == nil && len(data) > spareSize {
		// A claim that many pods share. Their names can be learnt again, and a record of one page needs no new block to change.
		r.Pods = nameless(h.Pods)
		data, err = r.encode()
	}
	if err != nil {
		return nil, fmt.Errorf("encode record of %s: %w", name, err)
	}
	return data, nil
}

func (r record) encode() ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	version := wholeVersion
	if r.ShareOf > 0 {
		version = recordVersion
	}
	return append(fmt.Appendf(nil, recordHeader, version, crc32.Checksum(body, castagnoli), len(body)), body...), nil
}

func nameless(pods []Pod) []Pod {
	bare := make([]Pod, len(pods))
	for i, pod := range pods {
		bare[i] = Pod{UID: pod.UID}
	}
	return bare
}

// decodeRecord reads what an own or a newer version wrote. newer is true for the latter: such a record is read as far as
// this version understands it and must be left on disk as it is.
func decodeRecord(data []byte) (r record, newer bool, err error) {
	line, rest, found := bytes.Cut(data, []byte("\n"))
	if !found {
		return record{}, false, fmt.Errorf("no header line in %d bytes", len(data))
	}
	var version, length int
	var sum uint32
	if _, err := fmt.Sscanf(string(line), recordMagic, &version); err == nil {
		newer = version > recordVersion
	}
	if _, err := fmt.Sscanf(string(line)+"\n", recordHeader, &version, &sum, &length); err != nil {
		return record{}, newer, fmt.Errorf("header %q: %w", line, err)
	}
	if version < 1 || length < 0 || length > len(rest) {
		return record{}, newer, fmt.Errorf("header %q: version %d, %d bytes promised, %d there", line, version, length, len(rest))
	}
	body := rest[:length]
	if got := crc32.Checksum(body, castagnoli); got != sum {
		return record{}, newer, fmt.Errorf("checksum is %08x, not %08x", got, sum)
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	if !newer {
		decoder.DisallowUnknownFields()
	}
	if err := decoder.Decode(&r); err != nil {
		return record{}, newer, fmt.Errorf("body: %w", err)
	}
	return r, newer, nil
}

// hold turns a decoded record back into the hold, provided that it says what its name says.
func (r record) hold(holder Holder, ref device.Ref) (Hold, error) {
	if r.Kind != holder.Kind || r.Holder != holder.ID || r.Device != ref.String() {
		return Hold{}, fmt.Errorf("contents are of %s %s on %s", r.Kind, r.Holder, r.Device)
	}
	if r.Kind != KindClaim && r.Kind != KindPod {
		return Hold{}, fmt.Errorf("unknown kind %q", r.Kind)
	}
	if r.ShareBytes > r.ShareOf {
		return Hold{}, fmt.Errorf("a share of %d of %d bytes", r.ShareBytes, r.ShareOf)
	}
	switch r.State {
	case StateRestored, StateHeld, StateDraining:
	default:
		return Hold{}, fmt.Errorf("unknown state %q", r.State)
	}
	return Hold{
		Holder: holder, Device: ref, Share: device.Share{Bytes: r.ShareBytes, Of: r.ShareOf}, State: r.State, Since: r.Since, Resource: r.Resource,
		Namespace: r.Namespace, Name: r.Name, Pods: r.Pods, Generation: r.Generation,
	}, nil
}
