// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// mostPods bounds the pods of one holder that are named.
const mostPods = 3

// Holder returns a holder for users: "ml/train-0 (claim gpu)", "ml/infer (limits)", or "claim ml/gpu" while no pod of the claim is known.
// It is a pure function. kubectl gpu ls and node call it.
func Holder(h v1alpha1.DeviceHolder) string {
	var pods []string
	for _, p := range h.Pods {
		pods = append(pods, podName(p))
	}
	switch {
	case len(pods) > 0:
		return strings.Join(FirstOf(pods, mostPods, "%d more"), ", ") + " (" + via(h) + ")"
	case h.Kind == v1alpha1.HolderPod:
		return "? (limits)"
	default:
		return "claim " + cmp.Or(strings.Trim(h.Namespace+"/"+h.Name, "/"), string(h.UID))
	}
}

func podName(p v1alpha1.PodReference) string {
	if p.Name == "" {
		return string(p.UID)
	}
	return p.Namespace + "/" + p.Name
}

// via returns how a holder got its device.
func via(h v1alpha1.DeviceHolder) string {
	if h.Kind == v1alpha1.HolderPod {
		return "limits"
	}
	return "claim " + cmp.Or(h.Name, string(h.UID))
}

// Share returns the share of a holder, such as "10240 MiB" or "1 share"; empty for the whole device. It is a pure function.
func Share(h v1alpha1.DeviceHolder) string {
	switch {
	case !h.Shared && h.Memory == 0:
		return ""
	case h.Shares > 0 && h.Memory > 0:
		return equalShares(h.Shares) + ", " + Mebibytes(h.Memory)
	case h.Shares > 0:
		return equalShares(h.Shares)
	case h.Memory > 0:
		return Mebibytes(h.Memory)
	default:
		return "a share"
	}
}

// namespaceOf returns the namespace of a holder; empty if it is not known.
func namespaceOf(h v1alpha1.DeviceHolder) string {
	if h.Namespace != "" {
		return h.Namespace
	}
	for _, p := range h.Pods {
		if p.Namespace != "" {
			return p.Namespace
		}
	}
	return ""
}

// named returns a holder as far as the viewer may know it.
func (f Facts) named(h v1alpha1.DeviceHolder) string {
	if namespace := namespaceOf(h); namespace != "" && f.MayName != nil && f.MayName(namespace) {
		return Holder(h)
	}
	return Unnamed(h.Kind)
}

// Unnamed returns a holder that the viewer may not know, for users. It is pure. Views call it.
func Unnamed(kind v1alpha1.HolderKind) string {
	if kind == v1alpha1.HolderPod {
		return "another namespace (limits)"
	}
	return "another namespace (claim)"
}

// UnnamedProcess is what a holder waits for that the viewer may not know.
const UnnamedProcess = "the last process of a pod of another namespace"

// blockers returns which holders have the devices that would satisfy a need, and what would free them.
func (f Facts) blockers(s *stock, short shortage, node string) (holders, frees []string) {
	held := 0
	for _, b := range short.blocked {
		name := availability.NameOf(b.device)
		switch b.reason {
		case availability.Unhealthy:
			frees = append(frees, fmt.Sprintf("%s of %s, once it is healthy again: %s", b.device, node, OneLine(b.detail)))
			continue
		case availability.Maintenance:
			frees = append(frees, fmt.Sprintf("%s of %s, once its maintenance has ended (kubectl gpu undrain %s/%s): %s", b.device, node, node,
				name.GPU, cmp.Or(OneLine(b.detail), "no reason given")))
			continue
		case availability.Tainted:
			// Once for all devices: a rule may select every partition that is possible.
			frees = append(frees, fmt.Sprintf("devices of %s with the taint %s, once it has ended, or with a claim that tolerates it", node, OneLine(b.detail)))
			continue
		}
		lines := f.holdersOf(s, name)
		if b.detail != "" && len(lines) > 0 && !strings.HasPrefix(b.detail, "no room") {
			lines[0] += ", " + b.detail
		}
		if len(lines) == 0 {
			lines = []string{b.device + "  " + cmp.Or(f.allocatedTo(s, name), b.detail, string(b.reason))}
		}
		held++
		holders = append(holders, lines...)
		if waits := f.waitsFor(s, name); waits != "" {
			frees = append(frees, fmt.Sprintf("%s of %s, once this has ended: %s", b.device, node, waits))
		}
	}
	lack := short.count - short.free
	switch {
	case held == 0 || short.all || lack < 1:
	case lack == 1:
		frees = append([]string{fmt.Sprintf("one of the devices above of %s, once its holder has ended", node)}, frees...)
	default:
		frees = append([]string{fmt.Sprintf("%d of the devices above of %s, once their holders have ended", lack, node)}, frees...)
	}
	return FirstOf(uniq(holders), mostHolders, "and %d more"), frees
}

// holdersOf returns a line for each device with holders that overlaps the named one. Partitions that do not exist yet overlap their GPU.
func (f Facts) holdersOf(s *stock, name availability.Name) (lines []string) {
	_, exists := s.node.Devices[cmp.Or(name.Partition, name.GPU)]
	for _, d := range s.status.Devices {
		of := availability.StatusName(d)
		if len(d.Holders) == 0 || !of.Overlaps(name) && (exists || of.GPU != name.GPU) {
			continue
		}
		texts := make([]string, len(d.Holders))
		for i, h := range d.Holders[:min(mostPods, len(d.Holders))] {
			texts[i] = strings.TrimSpace(f.named(h) + " " + Share(h))
			if h.State == v1alpha1.HoldDraining {
				texts[i] += ", ending"
			}
		}
		lines = append(lines, d.Name+"  "+strings.Join(FirstOf(texts, mostPods, "%d more"), "; "))
	}
	return lines
}

// allocatedTo returns the claim that the scheduler allocated a device to and that does not hold it yet.
func (f Facts) allocatedTo(s *stock, name availability.Name) string {
	for _, use := range s.uses {
		if use.Reason != availability.Allocated || !use.Device.Overlaps(name) {
			continue
		}
		for _, claim := range s.claims {
			switch {
			case string(claim.UID) != use.Holder.ID:
			case f.MayName != nil && f.MayName(claim.Namespace):
				return fmt.Sprintf("allocated to claim %s/%s, which is not prepared yet", claim.Namespace, claim.Name)
			default:
				return "allocated to a claim of another namespace, which is not prepared yet"
			}
		}
	}
	return ""
}

// waitsFor returns what a holder that has ended waits for, as far as the viewer may know it.
func (f Facts) waitsFor(s *stock, name availability.Name) string {
	for _, d := range s.status.Devices {
		if !availability.StatusName(d).Overlaps(name) {
			continue
		}
		for _, h := range d.Holders {
			switch {
			case h.WaitsFor == "":
			case f.MayName != nil && f.MayName(namespaceOf(h)):
				return OneLine(h.WaitsFor)
			default:
				return UnnamedProcess
			}
		}
	}
	return ""
}

// scheduler returns what the scheduler said last of the pod.
func (f Facts) scheduler() string {
	for _, c := range f.Pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Message != "" {
			return OneLine(Bounded(c.Message, mostMessage))
		}
	}
	return f.lastEvent("FailedScheduling")
}

// lastEvent returns the message of the newest event with the reason.
func (f Facts) lastEvent(reason string) (message string) {
	var last time.Time
	for _, e := range f.Events {
		if e.Reason == reason && !eventTime(e).Before(last) {
			last, message = eventTime(e), eventText(e)
		}
	}
	return message
}

// dull are reasons of events that say nothing about GPUs, or that the answer has already.
var dull = []string{"Scheduled", "Pulled", "Pulling", "Created", "Started", "SuccessfulCreate", "FailedScheduling", "Killing",
	"WaitForFirstConsumer"}

// events returns the newest events of the pod and its claims, the newest first and each text once.
func (f Facts) events() (texts []string) {
	found := slices.Clone(f.Events)
	slices.SortStableFunc(found, func(a, b corev1.Event) int { return eventTime(b).Compare(eventTime(a)) })
	for _, e := range found {
		if slices.Contains(dull, e.Reason) {
			continue
		}
		text := fmt.Sprintf("%s on %s %s: %s", e.Reason, strings.ToLower(e.InvolvedObject.Kind), e.InvolvedObject.Name, eventText(e))
		text = Bounded(OneLine(text), mostText)
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
		if len(texts) == mostEvents {
			break
		}
	}
	return texts
}

// eventText is the message of an event on one line, without what client-go adds to many of a kind.
func eventText(e corev1.Event) string {
	return strings.TrimPrefix(OneLine(Bounded(e.Message, mostMessage)), "(combined from similar events): ")
}

func eventTime(e corev1.Event) time.Time {
	switch {
	case e.Series != nil:
		return e.Series.LastObservedTime.Time
	case !e.LastTimestamp.IsZero():
		return e.LastTimestamp.Time
	case !e.EventTime.IsZero():
		return e.EventTime.Time
	default:
		return e.CreationTimestamp.Time
	}
}
