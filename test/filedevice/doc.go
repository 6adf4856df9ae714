// SPDX-License-Identifier: Apache-2.0

// Package filedevice tests that the node agent's discovery of devices can be replaced. Its devices are not GPUs: each is a file in a
// directory. A small source finds the files, and the ledger, the CDI specs and both front-ends serve them to a kubelet over real
// sockets. Nothing of NVIDIA is linked. It has tests only.
package filedevice
