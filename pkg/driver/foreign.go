// SPDX-License-Identifier: Apache-2.0

// DRA drivers of another name that publish GPUs of this node, and the withdrawal of those GPUs.

package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// sourceForeign is the driver's source of ledger.Withhold for DRA drivers of other names.
const sourceForeign = "foreign DRA driver"

// ForeignDriverError means that a DRA driver of another name publishes a GPU of this node, so that the scheduler gives it away twice. Both
// APIs withhold all devices until the driver publishes none of them and no pod uses a claim of them. Ready returns it.
type ForeignDriverError struct {
	DriverName string
	// Slice and Device publish the GPU, which Attribute identifies by Value. They are empty if Claim is set.
	Slice, Device, Attribute, Value string
	// Claim is one that the driver has prepared and a pod still uses, "namespace/name". It is set once the driver publishes no GPU of the node.
	Claim string
}

// Error names the driver and the remedy. It does not name the claim, because every pod may read /readyz, and more people may read GPUNodes than
// claims.
func (e *ForeignDriverError) Error() string {
	if e.Claim != "" {
		return fmt.Sprintf("DRA driver %s no longer publishes GPUs of this node, but pods still use a claim of them: end the pods with the claim that event "+
			"ConflictingDriver of the node names", e.DriverName)
	}
	return fmt.Sprintf("DRA driver %s publishes a GPU of this node, too (%s %s, device %s of ResourceSlice %s): end the pods with its claims and uninstall it, "+
		"or let only one of the two drivers manage this GPU", e.DriverName, e.Attribute, e.Value, e.Device, e.Slice)
}

// foreignSlices selects the slices that other drivers publish for this node.
func (d *Driver) foreignSlices(o *metav1.ListOptions) {
	o.FieldSelector = fields.AndSelectors(
		fields.OneTermEqualSelector(resourceapi.ResourceSliceSelectorNodeName, d.NodeName),
		fields.OneTermNotEqualSelector(resourceapi.ResourceSliceSelectorDriver, d.DriverName)).String()
}

// lookForForeign looks once for a DRA driver of another name that publishes our GPUs. If the API server does not answer, it withholds
// devices.
func (d *Driver) lookForForeign(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var o metav1.ListOptions
	d.foreignSlices(&o)
	list, err := d.KubeClient.ResourceV1().ResourceSlices().List(call, o)
	if err != nil {
		err = fmt.Errorf("look for other DRA drivers of this node's GPUs: %w", err)
		if apierrors.IsNotFound(err) {
			d.Ledger.Withhold(sourceForeign, nil) // the API server serves no DRA API
		} else {
			d.Ledger.Withhold(sourceForeign, err)
		}
		return err
	}
	found := make([]*resourceapi.ResourceSlice, len(list.Items))
	for i := range list.Items {
		found[i] = &list.Items[i]
	}
	d.withholdForeign(ctx, d.foreignOf(found))
	d.foreignListed = true
	return nil
}

// watchForeign withholds devices while a DRA driver of another name publishes our GPUs, until ctx is done.
func (d *Driver) watchForeign(ctx context.Context) error {
	said := ""
	retry(ctx, klog.FromContext(ctx), "", func() error {
		if d.foreignListed {
			return nil // by FindConflicting
		}
		err := d.lookForForeign(ctx)
		if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			d.reportForeign(ctx, "Serving nothing new without knowing whether another DRA driver has GPUs of this node", err)
		}
		return err
	})
	factory := informers.NewSharedInformerFactoryWithOptions(d.KubeClient, 0, informers.WithTweakListOptions(d.foreignSlices))
	informer := factory.Resource().V1().ResourceSlices()
	var changed broadcast.Signal
	handler, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed.Notify() }, UpdateFunc: func(any, any) { changed.Notify() }, DeleteFunc: func(any) { changed.Notify() },
	})
	if err != nil {
		return fmt.Errorf("watch the ResourceSlices of other drivers: %w", err)
	}
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	if !cache.WaitFor(ctx, "", handler.HasSyncedChecker()) {
		return nil
	}
	for ctx.Err() == nil {
		next, inventory := changed.Changed(), d.Inventory.Changed()
		all, err := informer.Lister().List(labels.Everything())
		if err != nil {
			return fmt.Errorf("list the ResourceSlices of other drivers: %w", err)
		}
		var again <-chan time.Time
		if d.withholdForeign(ctx, d.foreignOf(all)) {
			again = time.After(d.CheckInterval) // nothing reports the end of a cgroup
		}
		select {
		case <-ctx.Done():
		case <-next:
		case <-inventory:
		case <-again:
		}
	}
	return nil
}

// foreignDevices are the devices of a driver that are our GPUs, and an error about the first of them.
type foreignDevices struct {
	devices map[podstate.PoolDevice]bool
	first   *ForeignDriverError
}

// foreignOf returns, for each driver of these slices, the devices that are our GPUs, or partitions of them: drivers publish their UUID as an
// attribute of their own (NVIDIA: uuid), or their PCI address as the standard one.
func (d *Driver) foreignOf(published []*resourceapi.ResourceSlice) map[string]foreignDevices {
	found := map[string]foreignDevices{}
	ours := map[string]bool{}
	for _, gpu := range d.Inventory.Inventory().GPUs {
		if !d.OfferedToClaims(gpu) && !d.OfferedToPods(gpu) {
			continue
		}
		ours[gpu.UUID], ours[gpu.PCIBusID] = true, true
		for _, partition := range gpu.Partitions {
			ours[partition.UUID] = true
		}
	}
	delete(ours, "")
	published = slices.SortedFunc(slices.Values(published), func(a, b *resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) })
	for _, slice := range published {
		if slice.Spec.Driver == d.DriverName {
			continue // client-go's fake does not select by fields
		}
		for _, device := range slice.Spec.Devices {
			for _, name := range slices.Sorted(maps.Keys(device.Attributes)) {
				value := device.Attributes[name].StringValue
				identifies := strings.HasSuffix(strings.ToLower(path.Base(string(name))), "uuid") ||
					name == resourceapi.QualifiedName(deviceattribute.StandardDeviceAttributePCIBusID)
				if !identifies || value == nil || !ours[*value] {
					continue
				}
				f, known := found[slice.Spec.Driver]
				if !known {
					f = foreignDevices{map[podstate.PoolDevice]bool{}, &ForeignDriverError{
						DriverName: slice.Spec.Driver, Slice: slice.Name, Device: device.Name, Attribute: string(name), Value: *value,
					}}
					found[slice.Spec.Driver] = f
				}
				f.devices[podstate.PoolDevice{Pool: slice.Spec.Pool.Name, Device: device.Name}] = true
			}
		}
	}
	return found
}

// withholdForeign withholds devices while there is a foreign driver, and after that while a pod uses a claim of the devices that the driver
// published: such a claim names none of our devices, so the ledger cannot hold them for it. It reports whether devices are withheld.
func (d *Driver) withholdForeign(ctx context.Context, found map[string]foreignDevices) bool {
	for name, f := range found {
		if d.foreign[name] == nil {
			d.foreign[name] = map[podstate.PoolDevice]bool{}
		}
		maps.Copy(d.foreign[name], f.devices)
	}
	var reason *ForeignDriverError
	for _, name := range slices.Sorted(maps.Keys(d.foreign)) {
		why := found[name].first
		if why == nil {
			why = d.claimsOfForeign(name, d.foreign[name])
		}
		if why == nil {
			delete(d.foreign, name)
			klog.FromContext(ctx).Info("The other DRA driver no longer has GPUs of this node", "driverName", name)
		}
		reason = cmp.Or(reason, why)
	}
	if reason == nil {
		d.foreignSaid = ""
		d.Ledger.Withhold(sourceForeign, nil)
		return false
	}
	d.Ledger.Withhold(sourceForeign, reason)
	if text := reason.Error() + reason.Claim; text != d.foreignSaid {
		d.foreignSaid = text
		d.reportForeign(ctx, "Serving nothing new while another DRA driver has GPUs of this node", reason)
	}
	return true
}

func (d *Driver) reportForeign(ctx context.Context, message string, reason error) {
	text := reason.Error()
	if foreign, is := errors.AsType[*ForeignDriverError](reason); is && foreign.Claim != "" {
		text += ": " + foreign.Claim
	}
	klog.FromContext(ctx).Info(message, "reason", text)
	d.Recorder.Event(regarding.Node(d.NodeName), corev1.EventTypeWarning, "ConflictingDriver", text)
}

// claimsOfForeign returns a claim of such devices that a driver prepared and a pod may use. kubelet's state has the claim until the driver
// unprepares it, which never happens once the driver is gone.
func (d *Driver) claimsOfForeign(driver string, devices map[podstate.PoolDevice]bool) *ForeignDriverError {
	claims, err := podstate.ReadClaimState(d.KubeletDir, driver)
	if err != nil {
		return &ForeignDriverError{DriverName: driver, Claim: fmt.Sprintf("(not known: %v)", err)}
	}
	holds := d.Ledger.Holds()
	for _, claim := range claims {
		// Tandem prepared it, under an earlier driverName.
		if slices.ContainsFunc(holds, func(h ledger.Hold) bool { return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID} }) {
			continue
		}
		if !slices.ContainsFunc(claim.Devices, func(named podstate.PoolDevice) bool { return devices[named] }) {
			continue
		}
		h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: claim.UID}}
		for _, uid := range claim.PodUIDs {
			h.Pods = append(h.Pods, ledger.Pod{UID: uid})
		}
		if d.Pods.Uses(h) {
			return &ForeignDriverError{DriverName: driver, Claim: claim.Namespace + "/" + claim.Name}
		}
	}
	return nil
}
