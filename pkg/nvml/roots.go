// SPDX-License-Identifier: Apache-2.0

package nvml

// DevRoot is the directory whose dev/ holds the device nodes, as the host and as the agent names it. It changes only when
// the driver does.
func (n *Node) DevRoot() (host, agent string) {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	return n.layout.devRoot, n.options.onHost(n.layout.devRoot)
}
