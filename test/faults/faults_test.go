// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// TestInMounts: a mount becomes read-only in another mount namespace and writable again, and this process stays where it is.
func TestInMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	dir := t.TempDir()
	cmd := exec.Command("unshare", "--mount", "sh", "-c", "mount -t tmpfs none $0 && echo ready && exec sleep infinity", dir)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if said, err := bufio.NewReader(out).ReadString('\n'); err != nil || said != "ready\n" {
		t.Fatal(said, err)
	}
	proc := filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid))
	there := filepath.Join(proc, "root", dir, "x")
	for _, flags := range []uintptr{unix.MS_REMOUNT | unix.MS_BIND | unix.MS_RDONLY, unix.MS_REMOUNT | unix.MS_BIND} {
		if err := inMounts(filepath.Join(proc, "ns/mnt"), func() error { return unix.Mount("", dir, "", flags, "") }); err != nil {
			t.Fatal(err)
		}
		err := os.WriteFile(there, nil, 0o644)
		if readOnly := flags&unix.MS_RDONLY != 0; errors.Is(err, unix.EROFS) != readOnly || !readOnly && err != nil {
			t.Errorf("read-only: %t, written: %v", readOnly, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "x")); !os.IsNotExist(err) {
		t.Errorf("this process sees the other's mount: %v", err)
	}
}

// TestDevicePluginOffers: a reader of the list gets what is healthy, and each change.
func TestDevicePluginOffers(t *testing.T) {
	plugin := NewDevicePlugin(map[string]int{"nvidia0": 0, "nvidia1": 1})
	socket := filepath.Join(t.TempDir(), "plugin.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, plugin)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := pluginapi.NewDevicePluginClient(conn)
	stream, err := client.ListAndWatch(context.Background(), &pluginapi.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nvidia0 Healthy, nvidia1 Healthy", "nvidia0 Unhealthy, nvidia1 Healthy", "nvidia0 Unhealthy, nvidia1 Unhealthy"} {
		list, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range list.GetDevices() {
			got = append(got, d.GetID()+" "+d.GetHealth())
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("listed %v, want %s", got, want)
		}
		if want == "nvidia0 Healthy, nvidia1 Healthy" {
			plugin.Offer("nvidia1")
		} else {
			plugin.Offer()
		}
	}
	plugin.Give("nvidia1")
	for _, id := range []string{"GPU-of-another-plugin", "nvidia0"} {
		if _, err := client.Allocate(context.Background(), &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}},
		}); err == nil {
			t.Errorf("%s was allocated", id)
		}
	}
	answer, err := client.Allocate(context.Background(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{"nvidia1"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprintln(answer.GetContainerResponses()[0].GetDevices()[0].GetContainerPath(), plugin.Allocated()); got != "/dev/nvidia1 [nvidia1]\n" {
		t.Errorf("allocated %s", got)
	}
}
