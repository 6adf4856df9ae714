// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

// TestHostPortAndBandwidth: a pod with a GPU is reached from outside its node, and sends as fast as it may and no faster.
func TestHostPortAndBandwidth(t *testing.T) {
	const limit = 8_000_000 / 8 // bytes a second
	s := begin(t)
	s.example("hostport-bandwidth.yaml")
	s.running(soon, 1, 0)
	// From the control plane's machine: another network, and not the pods'.
	client := http.Client{Transport: &http.Transport{DialContext: theCluster.DialContext, DisableKeepAlives: true}, Timeout: soon}
	address := "http://" + node().IP() + ":18080"
	var listed string
	s.await(soon, "the host port to answer", func() (err error) {
		listed, err = fetch(client, address+"/cgi-bin/gpus")
		return err
	})
	gpus := s.gpus("hostport-bandwidth", "")
	if len(gpus) != 1 || strings.Count(listed, "/dev/nvidia") != 1 || !strings.Contains(listed, fmt.Sprintf("/dev/nvidia%d", gpus[0])) {
		t.Errorf("the pod sees GPUs %v and says:\n%s", gpus, listed)
	}
	if qdiscs := s.on(node(), "tc", "qdisc", "show"); !regexp.MustCompile(`tbf .* rate 8Mbit`).MatchString(qdiscs) {
		t.Errorf("no limit of 8Mbit:\n%s", qdiscs)
	}
	s.slowsDown(client, address+"/cgi-bin/zeros", 2*limit)
	s.noDoubleOwners()
}

func fetch(client http.Client, address string) (string, error) {
	response, err := client.Get(address)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return "", fmt.Errorf("get %s: %s", address, response.Status)
	}
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// slowsDown reads until no more than so many bytes come in a second. A burst is allowed before; the end is not.
func (s *story) slowsDown(client http.Client, address string, limit int) {
	s.Helper()
	response, err := client.Get(address)
	if err != nil {
		s.Fatal(err)
	}
	defer response.Body.Close()
	buffer, total, window, began := make([]byte, 1<<20), 0, 0, time.Now()
	for {
		n, err := response.Body.Read(buffer)
		total += n
		window += n
		if err != nil {
			s.Fatalf("read %d bytes and never felt the limit: %v", total, err)
		}
		took := time.Since(began)
		if took < time.Second {
			continue
		}
		if rate := float64(window) / took.Seconds(); rate <= float64(limit) {
			s.Logf("%.0f bytes a second after a burst of %d", rate, total-window)
			return
		}
		window, began = 0, time.Now()
	}
}
