// SPDX-License-Identifier: Apache-2.0

package nvml

// DriverRoot is the directory on the host below which the driver is installed. It changes only when the driver does.
func (n *Node) DriverRoot() string {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	return n.layout.driverRoot
}

// DevRoot is the directory whose dev/ holds the device nodes, as the host and as the agent names it. It changes only when
// the driver does.
func (n *Node) DevRoot() (host, agent string) {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	return n.layout.devRoot, n.options.onHost(n.layout.devRoot)
}
