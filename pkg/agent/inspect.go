// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

// Inspect is the command "kubelet-plugin inspect". It prints what the agent would find on this node, without Kubernetes, and returns an
// error if that is no GPU. It changes nothing, apart from the CDI spec where one is asked for. openDriver is that of Options.
func Inspect(ctx context.Context, c config.Inspect, openDriver func(nvml.Options, string) nvml.Options, stdout io.Writer) (err error) {
	if c.Output == "slices" && !c.Mode.Claims() {
		return fmt.Errorf("mode %s publishes no slices: add --mode=Dual or --mode=ClaimsOnly", c.Mode)
	}
	report := nvml.Inspect(ctx, nodeOptions(c.Config, openDriver))
	report.Version = version.String()
	switch c.Output {
	case "json":
		encoder := json.NewEncoder(stdout)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(report)
	case "slices":
		err = writeSlices(stdout, c.Config, report)
	default:
		err = report.WriteText(stdout)
	}
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return errors.Join(report.Err(), writeSpec(c.SpecDir, report))
}

// writeSlices writes the slices of a new node with the GPUs of the report. Without a node name, the slices have "node".
func writeSlices(out io.Writer, c config.Config, report nvml.Report) error {
	if report.Err() != nil {
		return nil // the caller reports it
	}
	template := driver.Template(c.DriverName, cmp.Or(c.NodeName, "node"), wiring.GPUPolicy(c).Apply(report.Devices()),
		c.OfferedToClaims, wiring.Strict(c))
	for _, slice := range template {
		text, err := yaml.Marshal(slice)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "---\n%s", text); err != nil {
			return err
		}
	}
	return nil
}

// Flags returns the flags of the agent in whose container this process runs: there it is the first process. Elsewhere there are none.
// proc is the directory of processes.
func Flags(proc string) []string {
	if os.Getpid() == 1 {
		return nil
	}
	line, err := os.ReadFile(filepath.Join(proc, "1/cmdline"))
	if err != nil {
		return nil
	}
	args := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	if filepath.Base(args[0]) != "kubelet-plugin" || len(args) > 1 && !strings.HasPrefix(args[1], "-") {
		return nil
	}
	return args[1:]
}

func writeSpec(dir string, report nvml.Report) error {
	if dir == "" {
		return nil
	}
	if len(report.CDI) == 0 {
		return fmt.Errorf("write CDI spec into %s: there is none", dir)
	}
	if err := os.WriteFile(filepath.Join(dir, cdi.SpecFile), report.CDI, 0o644); err != nil {
		return fmt.Errorf("write CDI spec: %w", err)
	}
	return nil
}
