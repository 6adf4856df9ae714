// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// capabilities are the minors of the devices below /dev/nvidia-caps, by what they give access to: "gpu0/gi3/access" for a GPU
// instance, "gpu0/gi3/ci0/access" for a compute instance (MIG User Guide, "Device Nodes and Capabilities"; nvcdi reads the same
// file, but only below "/").
type capabilities map[string]int

// migMinors is the driver's list of them, below proc.
const migMinors = "driver/nvidia-caps/mig-minors"

// readCapabilities reads the list; it is empty if the driver has no MIG.
func readCapabilities(procRoot string) (capabilities, error) {
	file, err := os.Open(filepath.Join(procRoot, migMinors))
	if err != nil {
		if os.IsNotExist(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("read MIG capabilities: %w", err)
	}
	defer func() { _ = file.Close() }()
	all := capabilities{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		name, number, _ := strings.Cut(lines.Text(), " ")
		// A later driver may add lines of another form.
		if minor, err := strconv.Atoi(number); err == nil {
			all[name] = minor
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read MIG capabilities: %w", err)
	}
	return all, nil
}

// of returns the minors of a partition's GPU instance and compute instance.
func (c capabilities) of(p gpu.Partition) (caps [2]int, err error) {
	instance := fmt.Sprintf("gpu%d/gi%d", p.Parent, p.GPUInstance)
	for i, name := range []string{instance + "/access", fmt.Sprintf("%s/ci%d/access", instance, p.ComputeInstance)} {
		minor, ok := c[name]
		if !ok {
			return caps, fmt.Errorf("the driver lists no capability %s in %s", name, migMinors)
		}
		caps[i] = minor
	}
	return caps, nil
}

// capabilityNode returns the path of a capability's device in a container.
func capabilityNode(minor int) string { return fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor) }
