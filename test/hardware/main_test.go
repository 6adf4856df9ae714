// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// wrapVariable makes this program change its own rights or its own /dev, and then run the rest of its command line.
const wrapVariable = "TANDEM_HARDWARE_WITHIN"

// nodesMark is before the list of nodes that a program has left in its /dev.
const nodesMark = "\n--- nodes\n"

func TestMain(m *testing.M) {
	if how := os.Getenv(wrapVariable); how != "" {
		if err := wrap(how, os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// within returns a command that runs another one with fewer rights or in another /dev.
func within(t *testing.T, cmd *exec.Cmd, how string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{self}, cmd.Args...)
	if loader := strings.Fields(os.Getenv(loaderVariable)); len(loader) > 0 {
		args = append(loader, append([]string{os.Args[0]}, cmd.Args...)...)
	}
	args[len(args)-len(cmd.Args)] = cmd.Path
	wrapped := exec.CommandContext(t.Context(), args[0], args[1:]...)
	wrapped.Env = append(cmd.Env, wrapVariable+"="+how)
	return wrapped
}

func wrap(how string, args []string) error {
	runtime.LockOSThread() // rights and namespaces are a thread's
	if err := os.Unsetenv(wrapVariable); err != nil {
		return err
	}
	switch how {
	case "without-sys-admin":
		if err := dropSysAdmin(); err != nil {
			return fmt.Errorf("drop SYS_ADMIN: %w", err)
		}
		return unix.Exec(args[0], args, os.Environ())
	case "private-dev":
		if err := privateDev(); err != nil {
			return fmt.Errorf("make a /dev: %w", err)
		}
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		ended := cmd.Run()
		made, err := filepath.Glob("/dev/nvidia*")
		if err != nil {
			return err
		}
		fmt.Printf("%s%s", nodesMark, strings.Join(made, " "))
		if ended != nil {
			fmt.Fprintln(os.Stderr, ended)
			os.Exit(1)
		}
		return nil
	}
	return fmt.Errorf("%s=%s is not known", wrapVariable, how)
}

func dropSysAdmin() error {
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_ADMIN, 0, 0, 0); err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	for _, set := range []*uint32{&data[0].Effective, &data[0].Permitted, &data[0].Inheritable} {
		*set &^= 1 << unix.CAP_SYS_ADMIN
	}
	return unix.Capset(&header, &data[0])
}

// privateDev gives this thread, and the programs that it starts, a /dev with the nodes that every program expects.
func privateDev() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	for name, minor := range map[string]uint32{"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9} {
		if err := unix.Mknod("/dev/"+name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))); err != nil {
			return err
		}
	}
	return os.MkdirAll("/dev/shm", 0o777)
}
