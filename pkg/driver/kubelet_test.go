// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	drapbv1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// fakeKubelet is kubelet's side of DRA on real sockets: it finds the registration socket, registers, and calls the announced
// service, in either API version.
type fakeKubelet struct {
	t    testing.TB
	dir  string
	conn *grpc.ClientConn
	// services that the driver announced.
	services []string
}

// startKubelet registers the driver, as a starting kubelet does.
func startKubelet(t testing.TB, dir, driverName string) *fakeKubelet {
	t.Helper()
	k := &fakeKubelet{t: t, dir: dir}
	eventually(t, "registration of the driver", func() error { return k.register(driverName) })
	t.Cleanup(k.stop)
	return k
}

func (k *fakeKubelet) stop() {
	if k.conn != nil {
		k.conn.Close()
	}
}

func (k *fakeKubelet) register(driverName string) error {
	found, err := filepath.Glob(filepath.Join(k.dir, "plugins_registry", "*.sock"))
	if err != nil {
		return err
	}
	for _, path := range found {
		if err := k.registerAt(path, driverName); err == nil {
			return nil
		}
	}
	return fmt.Errorf("no live registration socket among %v", found)
}

func (k *fakeKubelet) registerAt(path, driverName string) error {
	// kubelet's deadlines are 1 s for GetInfo and 5 s for the notification, which a busy machine may miss.
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if info.Type != registerapi.DRAPlugin || info.Name != driverName {
		return fmt.Errorf("%s is %s %s", path, info.Type, info.Name)
	}
	k.services = info.SupportedVersions
	k.stop()
	k.conn, err = grpc.NewClient("unix://"+info.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	_, err = client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true})
	return err
}

// prepared is what kubelet passes to the container runtime for one device.
type prepared struct {
	Requests          []string
	Pool, Device, CDI string
}

// callTimeout is kubelet's.
const callTimeout = 45 * time.Second

// shortCall is the deadline of calls that are to run into it. Enough for the whole answerMargin: a busy machine needs it.
const shortCall = 8 * time.Second

// prepare calls NodePrepareResources with the given API version ("v1" or "v1beta1") and returns devices or error by claim UID.
func (k *fakeKubelet) prepare(version string, claims ...*resourceapi.ResourceClaim) (map[string][]prepared, map[string]error, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	return k.prepareWith(ctx, version, claims...)
}

func (k *fakeKubelet) prepareWith(ctx context.Context, version string, claims ...*resourceapi.ResourceClaim) (map[string][]prepared, map[string]error, error) {
	devices, errs := map[string][]prepared{}, map[string]error{}
	if version == "v1beta1" {
		req := &drapbv1beta1.NodePrepareResourcesRequest{}
		for _, c := range claims {
			req.Claims = append(req.Claims, &drapbv1beta1.Claim{Uid: string(c.UID), Name: c.Name, Namespace: c.Namespace})
		}
		resp, err := drapbv1beta1.NewDRAPluginClient(k.conn).NodePrepareResources(ctx, req)
		if err != nil {
			return nil, nil, err
		}
		for uid, claim := range resp.Claims {
			if claim.Error != "" {
				errs[uid] = errors.New(claim.Error)
				continue
			}
			devices[uid] = []prepared{}
			for _, d := range claim.Devices {
				devices[uid] = append(devices[uid], newPrepared(d.RequestNames, d.PoolName, d.DeviceName, d.CdiDeviceIds))
			}
		}
		return devices, errs, nil
	}
	req := &drapbv1.NodePrepareResourcesRequest{}
	for _, c := range claims {
		req.Claims = append(req.Claims, &drapbv1.Claim{Uid: string(c.UID), Name: c.Name, Namespace: c.Namespace})
	}
	resp, err := drapbv1.NewDRAPluginClient(k.conn).NodePrepareResources(ctx, req)
	if err != nil {
		return nil, nil, err
	}
	for uid, claim := range resp.Claims {
		if claim.Error != "" {
			errs[uid] = errors.New(claim.Error)
			continue
		}
		devices[uid] = []prepared{}
		for _, d := range claim.Devices {
			devices[uid] = append(devices[uid], newPrepared(d.RequestNames, d.PoolName, d.DeviceName, d.CdiDeviceIds))
		}
	}
	return devices, errs, nil
}

func newPrepared(requests []string, pool, name string, cdi []string) prepared {
	p := prepared{Requests: requests, Pool: pool, Device: name}
	if len(cdi) == 1 {
		p.CDI = cdi[0]
	} else if len(cdi) > 1 {
		p.CDI = fmt.Sprint(cdi)
	}
	return p
}

// unprepare returns the error by claim UID; a claim without an entry is reported as an error, as kubelet does.
func (k *fakeKubelet) unprepare(version string, claims ...*resourceapi.ResourceClaim) (map[string]error, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	answers := map[string]string{}
	if version == "v1beta1" {
		req := &drapbv1beta1.NodeUnprepareResourcesRequest{}
		for _, c := range claims {
			req.Claims = append(req.Claims, &drapbv1beta1.Claim{Uid: string(c.UID), Name: c.Name, Namespace: c.Namespace})
		}
		resp, err := drapbv1beta1.NewDRAPluginClient(k.conn).NodeUnprepareResources(ctx, req)
		if err != nil {
			return nil, err
		}
		for uid, claim := range resp.Claims {
			answers[uid] = claim.Error
		}
	} else {
		req := &drapbv1.NodeUnprepareResourcesRequest{}
		for _, c := range claims {
			req.Claims = append(req.Claims, &drapbv1.Claim{Uid: string(c.UID), Name: c.Name, Namespace: c.Namespace})
		}
		resp, err := drapbv1.NewDRAPluginClient(k.conn).NodeUnprepareResources(ctx, req)
		if err != nil {
			return nil, err
		}
		for uid, claim := range resp.Claims {
			answers[uid] = claim.Error
		}
	}
	errs := map[string]error{}
	for _, c := range claims {
		message, answered := answers[string(c.UID)]
		switch {
		case !answered:
			errs[string(c.UID)] = errors.New("no entry in the answer")
		case message != "":
			errs[string(c.UID)] = errors.New(message)
		}
	}
	return errs, nil
}

// patience bounds every wait. A test that needs it has failed.
const patience = time.Minute

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting for %s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// socketsBelow lists every socket file under dir.
func socketsBelow(t testing.TB, dir string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.Type()&os.ModeSocket != 0 {
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(found)
	return found
}
