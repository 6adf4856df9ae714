// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/util/validation/field"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// sharedGroup are the devices of a claim for which the same entry of its parameters says how its containers share them, or one device
// of which it has a part.
type sharedGroup struct {
	entry   int
	path    *field.Path
	request string
	sharing parametersv1beta1.Sharing
	// devices get their UUIDs when they are made.
	devices []device.Device
	// answers are the places of the devices in the claim's answer.
	answers []int
	// beside is set where the claim has a part of the device, beside others, whose sharing is the node's policy.
	beside bool
	// cdi are the devices that their containers need in addition.
	cdi []string
	err error
}

// unsaid is the entry of a group of which no parameters speak.
const unsaid = -1

// stand adds the device of the last entry of the answer to those of which the claim has a part.
func (p *preparation) stand(request string, d device.Device) {
	i := slices.IndexFunc(p.groups, func(g *sharedGroup) bool { return g.beside && g.has(d.Ref()) })
	if i < 0 {
		i = len(p.groups)
		policy := d.Sharing()
		p.groups = append(p.groups, &sharedGroup{
			entry: unsaid, request: request, beside: true, devices: []device.Device{d},
			sharing: parametersv1beta1.Sharing{
				Strategy: parametersv1beta1.Strategy(policy.Strategy), Interval: parametersv1beta1.Interval(policy.Interval),
			},
		})
	}
	p.groups[i].answers = append(p.groups[i].answers, len(p.answer)-1)
}

// checkDaemons refuses a part of a GPU that has an MPS daemon together with another device for whoever refers to the same request.
func (p *preparation) checkDaemons() error {
	for _, g := range p.groups {
		if !g.beside || g.sharing.Strategy != parametersv1beta1.MPSStrategy {
			continue
		}
		for _, i := range g.answers {
			part := p.answer[i]
			for _, other := range p.answer {
				if other.Requests[0] == part.Requests[0] && other.DeviceName != part.DeviceName {
					return refuse(reasonNotShared, "request %s got a part of device %s, which is shared by MPS, and device %s, and a client of an MPS daemon sees that daemon's GPU only: "+
						"ask for one device in each request, and refer each container to one of them", part.Requests[0], part.DeviceName, other.DeviceName)
				}
			}
		}
	}
	return nil
}

// group adds the device of the last entry of the answer to those that are shared alike.
func (p *preparation) group(parameters parametersv1beta1.Said, request string, d device.Device, share device.Share) error {
	if !share.Whole() {
		const why = "%s: the claim has a part of device %s (%s), beside others: how they share it is for the node to say"
		return refuseParameters(request, fmt.Errorf(why, parameters.Path.Child("sharing"), d.Name(), share))
	}
	i := slices.IndexFunc(p.groups, func(g *sharedGroup) bool { return g.entry == parameters.Entry })
	if i < 0 {
		i = len(p.groups)
		p.groups = append(p.groups, &sharedGroup{
			entry: parameters.Entry, path: parameters.Path, request: request, sharing: *parameters.Sharing,
		})
	}
	g := p.groups[i]
	if !g.has(d.Ref()) {
		g.devices = append(g.devices, d)
	}
	g.answers = append(g.answers, len(p.answer)-1)
	return nil
}

func (g *sharedGroup) has(ref device.Ref) bool {
	return slices.ContainsFunc(g.devices, func(d device.Device) bool { return d.Ref() == ref })
}

// checkGroups refuses what these devices cannot do.
func (p *preparation) checkGroups() error {
	for _, g := range p.groups {
		if wrong := sharing.Check(g.devices, g.sharing, g.path.Child("sharing")); len(wrong) > 0 {
			return refuseParameters(g.request, wrong.ToAggregate())
		}
	}
	return nil
}

// made tells the groups of a partition that they were planned with.
func (p *preparation) made(partition device.Partition) {
	for _, g := range p.groups {
		for i, d := range g.devices {
			if d.Ref() == partition.Ref {
				g.devices[i].Partition = partition
			}
		}
	}
}

// share brings the devices of all claims to what their containers need, all at a time, and reports whether they are. Nothing is
// locked while a daemon starts.
func (d *Driver) share(ctx context.Context, preparations []*preparation) bool {
	var all sync.WaitGroup
	for _, p := range preparations {
		for _, g := range d.toShare(p) {
			all.Go(func() { g.cdi, g.err = d.apply(ctx, p, g) })
		}
	}
	all.Wait()
	ok := true
	for _, p := range preparations {
		for _, g := range p.groups {
			if g.err != nil {
				// The others are looked at as well: what was begun for one of them goes on.
				err := d.explainSharing(p, g)
				p.err, ok = cmp.Or(p.err, err), false
				continue
			}
			for _, i := range g.answers {
				p.answer[i].CDIDeviceIDs = append(p.answer[i].CDIDeviceIDs, g.cdi...)
			}
		}
	}
	return ok
}

// toShare are the claim's groups, what it has had shared and is to have for one container's use now, and the GPUs that are its own
// though the node shares them by MPS.
func (d *Driver) toShare(p *preparation) []*sharedGroup {
	if d.Sharing == nil {
		return p.groups
	}
	for _, ref := range p.request.Devices {
		if slices.ContainsFunc(p.groups, func(g *sharedGroup) bool { return g.has(ref) }) {
			continue
		}
		found, ok := d.Inventory.Inventory().ByRef(ref)
		g := &sharedGroup{entry: unsaid, devices: []device.Device{found}}
		switch {
		case !ok:
			continue
		case d.Policy != nil && found.Whole() && d.Policy.ByDaemon(found.GPU):
			g.sharing.Strategy = sharing.Exclusive
		case !d.Sharing.Applied(p.request.UID, ref):
			continue
		}
		p.groups = append(p.groups, g)
	}
	return p.groups
}

var errNoSharing = errors.New("this node serves no devices that are shared")

func (d *Driver) apply(ctx context.Context, p *preparation, g *sharedGroup) ([]string, error) {
	claim := sharing.Claim{UID: p.request.UID, Namespace: p.request.Namespace, Name: p.request.Name}
	switch {
	case g.beside && d.Policy == nil:
		return nil, nil
	case g.beside:
		return d.join(ctx, p, claim, g)
	case d.Sharing == nil:
		return nil, errNoSharing
	}
	return d.Sharing.Apply(ctx, sharing.Group{Claim: claim, Devices: g.devices, Sharing: g.sharing}, func() bool {
		return !slices.ContainsFunc(g.devices, func(member device.Device) bool { return !d.holds(p, member.Ref()) })
	})
}

// join notes what the policy has come to: it may have changed.
func (d *Driver) join(ctx context.Context, p *preparation, claim sharing.Claim, g *sharedGroup) ([]string, error) {
	share := p.request.Shares[g.devices[0].Ref()]
	cdiDevices, err := d.Policy.Join(ctx, claim, g.devices[0], share)
	if err == nil && !d.holds(p, g.devices[0].Ref()) {
		return nil, errors.New("its claim was unprepared meanwhile")
	}
	if byDaemon := len(cdiDevices) > 0; err == nil && byDaemon != (g.sharing.Strategy == parametersv1beta1.MPSStrategy) {
		g.sharing = parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing}
		if byDaemon {
			g.sharing.Strategy = parametersv1beta1.MPSStrategy
		}
	}
	return cdiDevices, err
}

// explainSharing says what the claim waits for. What a daemon was asked for with stays, so that the next attempt finds it ready.
func (d *Driver) explainSharing(p *preparation, g *sharedGroup) error {
	err := g.err
	late, ok := errors.AsType[*sharing.NotReadyError](err)
	switch {
	case ok:
	case errors.Is(err, device.ErrUnsupported) && g.path != nil:
		path, value := g.path.Child("sharing", "strategy"), string(g.sharing.Strategy)
		if g.sharing.Strategy == parametersv1beta1.TimeSlicing {
			path, value = g.path.Child("sharing", "timeSlicingConfig", "interval"), string(g.sharing.Interval)
		}
		return refuseParameters(g.request, field.Invalid(path, value, err.Error()))
	default:
		return refuse(reasonNotShared, "trying again: %v", err)
	}
	// The daemon of a policy needs no claim to go on.
	p.begun = p.begun || !g.beside
	trouble := ""
	if d.DaemonTrouble != nil {
		trouble = d.DaemonTrouble(late.Daemon)
	}
	if trouble != "" {
		return refuse(reasonDaemonNotReady, "trying again: %v: its pod does not run: %s", err, trouble)
	}
	return refuse(reasonDaemonNotReady, "trying again: %v", err)
}
