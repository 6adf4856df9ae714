// SPDX-License-Identifier: Apache-2.0

// Package driverroot finds libraries and programs of a driver below its root directory, and translates paths between root
// directories.
package driverroot

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// maxLinks is the kernel's own limit on symbolic links in one path (MAXSYMLINKS).
const maxLinks = 40

// Resolve follows symbolic links of path the way a process sees them whose root directory is root: an absolute link on
// the host must not be followed into the agent's own file system. Path is relative to root; so is the result.
func Resolve(root, path string) (string, error) {
	todo := strings.Split(strings.Trim(filepath.Clean("/"+path), "/"), "/")
	done := "/"
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = filepath.Dir(done)
			continue
		}
		next := filepath.Join(done, part)
		target, err := os.Readlink(filepath.Join(root, next))
		if err != nil {
			if !isNotLink(err) {
				return "", err
			}
			done = next
			continue
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("resolve %s below %s: %w", path, root, syscall.ELOOP)
		}
		if filepath.IsAbs(target) {
			done = "/"
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return done, nil
}

// isNotLink tells a file that exists and is no link: readlink(2) says EINVAL.
func isNotLink(err error) bool {
	pathErr, ok := err.(*os.PathError)
	return ok && pathErr.Err == syscall.EINVAL
}

// Find finds a program of the driver, relative to the driver root.
func Find(root, program string) (string, error) {
	for _, dir := range ProgramDirs {
		if path, err := Resolve(root, filepath.Join(dir, program)); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("find %s: it is in none of %s below %s", program, strings.Join(ProgramDirs, ", "), root)
}
