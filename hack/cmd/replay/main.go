// SPDX-License-Identifier: Apache-2.0

// Command replay turns the output of "kubelet-plugin inspect -o json" into a profile of a simulated machine: it prints the profile, and
// to standard error what the recording does not say.
package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/simulated/recording"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: replay FILE, where the file is the output of kubelet-plugin inspect -o json")
		os.Exit(2)
	}
	if err := replay(os.Args[1], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "replay:", err)
		os.Exit(1)
	}
}

func replay(path string, stdout, stderr io.Writer) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	rec, err := recording.Read(file)
	if err != nil {
		return err
	}
	name := strings.ToLower(strings.TrimSuffix(filepath.Base(path), filepath.Ext(path)))
	profile, assumed, err := rec.Profile(name)
	for _, a := range assumed {
		fmt.Fprintln(stderr, "assumed:", a)
	}
	if err != nil {
		return err
	}
	data, err := yaml.Marshal(profile)
	if err != nil {
		return err
	}
	for _, a := range assumed {
		fmt.Fprintln(stdout, "# assumed:", a)
	}
	_, err = stdout.Write(data)
	return err
}
