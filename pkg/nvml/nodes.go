// SPDX-License-Identifier: Apache-2.0

// The driver's device nodes in /dev.

package nvml

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/driverroot"
)

// majors are the major numbers of the driver's character devices, by their names in /proc/devices. Those of nvidia-uvm and nvidia-caps
// differ from boot to boot, and a module that is loaded again may get another one. Empty if the list has no NVIDIA driver: then no
// number is checked.
type majors map[string]uint32

// Names of the driver's devices in /proc/devices. Drivers before R550 call theirs nvidia-frontend (nvidia-container-toolkit,
// internal/info/proc/devices).
const (
	driverGPU  = "nvidia"
	driverUVM  = "nvidia-uvm"
	driverCaps = "nvidia-caps"
)

// majors reads /proc/devices.
func (h Host) majors() majors {
	text, err := os.ReadFile(filepath.Join(h.ProcRoot, "devices"))
	if err != nil {
		return nil
	}
	characters, _, _ := bytes.Cut(text, []byte("Block devices:"))
	all := majors{}
	for line := range bytes.Lines(characters) {
		fields := strings.Fields(string(line))
		if len(fields) != 2 || !strings.HasPrefix(fields[1], driverGPU) {
			continue
		}
		if major, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
			all[fields[1]] = uint32(major)
		}
	}
	if frontend, old := all["nvidia-frontend"]; old {
		all[driverGPU] = frontend
	}
	if _, loaded := all[driverGPU]; !loaded {
		return nil
	}
	return all
}

// charDevice is a device node of the driver.
type charDevice struct {
	// path is relative to the device root, and the path in containers.
	path   string
	driver string
	minor  uint32
	mode   fs.FileMode
}

// controlDevices are what every CUDA program opens. The numbers are those of nvidia-modprobe (nvidia-modprobe-utils.h).
var controlDevices = []charDevice{
	{"/dev/nvidiactl", driverGPU, 255, 0o666},
	{"/dev/nvidia-uvm", driverUVM, 0, 0o666},
	{"/dev/nvidia-uvm-tools", driverUVM, 1, 0o666},
}

func gpuDevice(minor int) charDevice {
	return charDevice{fmt.Sprintf("/dev/nvidia%d", minor), driverGPU, uint32(minor), 0o666}
}

// capabilityDevice has the mode of /proc/driver/nvidia/capabilities/…/access (DeviceFileMode).
func capabilityDevice(minor int) charDevice {
	return charDevice{fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), driverCaps, uint32(minor), 0o444}
}

// checkDevice returns why a node cannot be given to containers.
func (h Host) checkDevice(devRoot string, numbers majors, d charDevice) error {
	major, loaded := numbers[d.driver]
	if len(numbers) > 0 && !loaded {
		if d.driver == driverUVM {
			return fmt.Errorf("kernel module %s is not loaded", d.driver)
		}
		return fmt.Errorf("%s cannot be used: the kernel lists no devices %s in /proc/devices", d.path, d.driver)
	}
	path := filepath.Join(devRoot, d.path)
	var info unix.Stat_t
	switch err := unix.Lstat(h.onHost(path), &info); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%s does not exist", path)
	case err != nil:
		return &os.PathError{Op: "look at", Path: path, Err: err}
	case info.Mode&unix.S_IFMT != unix.S_IFCHR:
		return fmt.Errorf("%s is no character device", path)
	}
	if has := info.Rdev; loaded && has != unix.Mkdev(major, d.minor) {
		return fmt.Errorf("%s has device number %d:%d, but the driver's is %d:%d: it is from an earlier load of the driver",
			path, unix.Major(has), unix.Minor(has), major, d.minor)
	}
	return nil
}

// ensureDevice creates a node that is missing or has another number, if the agent may, and returns why containers cannot be given it.
func (r *reader) ensureDevice(d charDevice) error {
	o, devRoot, numbers := r.options, r.layout.devRoot, r.majors
	err := o.checkDevice(devRoot, numbers, d)
	if !o.CreateNodes {
		return err
	}
	if major, loaded := numbers[d.driver]; err != nil && loaded {
		if failure := o.createNode(filepath.Join(devRoot, d.path), major, d); failure != nil {
			return fmt.Errorf("%w; cannot create it: %w", err, failure)
		}
		klog.Background().Info("Created a device node", "path", filepath.Join(devRoot, d.path), "major", major, "minor", d.minor,
			"reason", err.Error())
		err = o.checkDevice(devRoot, numbers, d)
	}
	if err == nil {
		if failure := o.linkNode(devRoot, d.path); failure != nil {
			klog.Background().V(4).Info("Cannot link a device node below /dev/char", "path", d.path, "err", failure.Error())
		}
	}
	return err
}

// ensureControlDevices is ensureDevice for the nodes that every GPU needs. unloadable is why nvidia-uvm could not be loaded.
func (r *reader) ensureControlDevices(unloadable error) (err error) {
	for _, d := range controlDevices {
		err = cmp.Or(err, r.ensureDevice(d))
	}
	if err != nil && unloadable != nil {
		err = fmt.Errorf("%w; the agent cannot load nvidia-uvm: %w", err, unloadable)
	}
	if err != nil {
		err = fmt.Errorf("%w. Without it no CUDA program works; `nvidia-modprobe -u -c=0` on the node loads the module and creates the nodes", err)
	}
	return err
}

// createNode creates a node in place of what is there. path is the host's.
func (h Host) createNode(path string, major uint32, d charDevice) error {
	params := contents(h.ProcRoot, "driver/nvidia/params")
	if strings.Contains(params, "ModifyDeviceFiles: 0") {
		return errors.New("the administrator manages the nodes (module parameter NVreg_ModifyDeviceFiles=0)")
	}
	target := h.onHost(path)
	// The directory for capabilities may not exist yet. A missing /dev is not made.
	if err := os.Mkdir(filepath.Dir(target), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	temporary := temporaryName(target)
	err := os.NewSyscallError("mknod", unix.Mknod(temporary, unix.S_IFCHR|uint32(d.mode), int(unix.Mkdev(major, d.minor))))
	if err == nil {
		err = os.Chmod(temporary, d.mode) // mknod obeys the umask
	}
	if err == nil {
		err = os.Rename(temporary, target)
	}
	return err
}

// temporaryName is another name each time: scans and operations may create the same node at once.
func temporaryName(path string) string {
	return filepath.Join(filepath.Dir(path), fmt.Sprintf(".tandem-%s-%x", filepath.Base(path), rand.Uint64()))
}

// linkNode makes the link /dev/char/<major>:<minor> of the host lead to a node. systemd before 240 and runc with its cgroup driver find
// devices by it, and containers lose their GPU after a `systemctl daemon-reload` if it is missing (NVIDIA/nvidia-container-toolkit#48).
// udev makes no link: it does not know nodes that were made by mknod.
func (h Host) linkNode(devRoot, path string) error {
	var info unix.Stat_t
	if err := unix.Lstat(h.onHost(filepath.Join(devRoot, path)), &info); err != nil {
		return err
	}
	link := fmt.Sprintf("/dev/char/%d:%d", unix.Major(info.Rdev), unix.Minor(info.Rdev))
	if found, err := driverroot.Resolve(h.HostRoot, link); err == nil {
		var there unix.Stat_t
		if unix.Lstat(h.onHost(found), &there) == nil && there.Mode&unix.S_IFMT == unix.S_IFCHR && there.Rdev == info.Rdev {
			return nil
		}
	}
	target := filepath.Join(devRoot, path)
	if devRoot == "/" {
		target = filepath.Join("..", strings.TrimPrefix(path, "/dev/")) // as udev does
	}
	temporary := temporaryName(h.onHost(link))
	if err := os.Symlink(target, temporary); err != nil {
		return err
	}
	return os.Rename(temporary, h.onHost(link))
}

// loadInterval is the time between attempts to load a kernel module.
const loadInterval = time.Minute

// loadUVM loads nvidia-uvm where the driver is loaded without it: with a driver from packages, only the first CUDA program on the host
// itself would load it. A new driver's majors are then those of the next scan. Under n.scanning.
func (n *Node) loadUVM(ctx context.Context) {
	if _, loaded := n.majors[driverUVM]; loaded {
		n.unloadable, n.loadTried = nil, time.Now() // an unload of the driver begins with it: it must not be loaded again meanwhile
	}
	if len(n.majors) == 0 || !n.options.CreateNodes || time.Since(n.loadTried) < loadInterval {
		return
	}
	n.loadTried = time.Now()
	_, n.unloadable = attempt(n, driverUVM, nil, func() (struct{}, error) {
		root, err := n.options.moduleRoot(n.layout.driverRoot)
		if err == nil {
			err = n.options.loadModule(root, driverUVM)
		}
		return struct{}{}, err
	}, nil)
	if n.unloadable != nil {
		return
	}
	klog.FromContext(ctx).Info("Loaded a kernel module", "module", driverUVM)
	n.mu.Lock()
	n.majors = n.options.majors()
	n.mu.Unlock()
}

const modprobe = "/sbin/modprobe"

// moduleRoot returns the agent's path of the root directory from which the driver's modules are loaded: the driver container's, or the
// host's.
func (h Host) moduleRoot(driverRoot string) (string, error) {
	roots := slices.Compact([]string{driverRoot, "/"})
	for _, root := range roots {
		if _, err := driverroot.Resolve(h.onHost(root), modprobe); err == nil {
			return h.onHost(root), nil
		}
	}
	return "", fmt.Errorf("there is no %s below %s", modprobe, strings.Join(roots, " or "))
}

// loadModule runs modprobe below a root directory, as NVIDIA's container toolkit does (pkg/system/nvmodules).
func loadModule(root, module string) error {
	command := exec.Command(modprobe, module)
	command.Dir, command.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: root}
	command.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("modprobe: %w: %s", err, bytes.TrimSpace(output))
	}
	return nil
}

// findDevRoot returns the root directory whose /dev has the driver's nodes: the driver's own, unless the host's has more of them. NVML,
// opened by root, creates nvidiactl and the GPUs' nodes in the /dev that the agent sees, but neither nvidia-uvm nor any node in the
// driver's /dev. Nodes with other numbers than the driver's do not count.
func (h Host) findDevRoot(driverRoot string) string {
	if h.DevRoot != Auto {
		return filepath.Clean(h.DevRoot)
	}
	numbers := h.majors()
	count := func(root string) (usable int) {
		for _, d := range controlDevices {
			if h.checkDevice(root, numbers, d) == nil {
				usable++
			}
		}
		for _, path := range deviceNodes(h.onHost(root)) {
			minor, isGPU := strings.CutPrefix(filepath.Base(path), "nvidia")
			if number, err := strconv.Atoi(minor); isGPU && err == nil && h.checkDevice(root, numbers, gpuDevice(number)) == nil {
				usable++
			}
		}
		return usable
	}
	if own := count(driverRoot); own > 0 && own >= count("/") {
		return driverRoot
	}
	return "/"
}
