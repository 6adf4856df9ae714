// SPDX-License-Identifier: Apache-2.0

// Package mig is the geometry of MIG (Multi-Instance GPU): which partitions fit beside each other on a GPU, what each of them
// takes of it, where to put the next one, and in which order to publish the places. It is pure: values in, values out, nothing
// kept, and every function may be called concurrently.
//
// A GPU in MIG mode is cut twice. GPU instances take memory slices: a profile says how many (A100 and Hopper have eight, A30
// four) and its placements say where they may start. Inside a GPU instance, compute instances take compute slices and share
// everything else. A partition is a compute instance; almost always it has its GPU instance to itself.
//
// Two GPU instances exclude each other when their memory slices overlap. Besides that the GPU runs out of what they take:
// there is one optical flow engine for all "+me" partitions, so one of them is all there can be, and a "+me.all" partition
// takes every media engine. A profile says how many of it the GPU holds at most.
//
// The functions work on the profiles that the driver of a GPU offers (device.Profile). Tables of GPU models are in
// simulated/models: the product has none.
package mig
