// SPDX-License-Identifier: Apache-2.0

package nvml

// DriverRoot returns the host path of the driver's root directory. It changes only with the driver.
func (n *Node) DriverRoot() string {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	return n.layout.driverRoot
}

// DevRoot returns the directory whose dev/ has the device nodes, as a path of the host and of the agent. It changes only with the
// driver.
func (n *Node) DevRoot() (host, agent string) {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	return n.layout.devRoot, n.options.onHost(n.layout.devRoot)
}
