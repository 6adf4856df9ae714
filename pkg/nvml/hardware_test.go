// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestHardwareIsToldFromADriver(t *testing.T) {
	for name, test := range map[string]struct {
		vendor, class string
		none          bool
	}{
		"a GPU":               {"0x10de", "0x030200", false},
		"a display GPU":       {"0x10de", "0x030000", false},
		"an NVSwitch":         {"0x10de", "0x068000", true},
		"another vendor's":    {"0x1002", "0x030000", true},
		"an empty sysfs":      {"", "", true},
		"no PCI bus in sysfs": {"-", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			sysfs := t.TempDir()
			function := filepath.Join(sysfs, "bus/pci/devices/0000:01:00.0")
			if test.vendor == "" {
				function = filepath.Dir(function)
			}
			if test.vendor != "-" {
				if err := os.MkdirAll(function, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if test.class != "" {
				for file, text := range map[string]string{"vendor": test.vendor, "class": test.class} {
					if err := os.WriteFile(filepath.Join(function, file), []byte(text+"\n"), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			_, err := Open(t.Context(), Options{Host: Host{HostRoot: t.TempDir(), SysfsRoot: sysfs}})
			missing, ok := errors.AsType[*NoDriverError](err)
			if !ok {
				t.Fatal(err)
			}
			if missing.NoHardware != test.none {
				t.Errorf("no hardware: %t, want %t", missing.NoHardware, test.none)
			}
		})
	}
}
