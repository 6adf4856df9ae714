// SPDX-License-Identifier: Apache-2.0

// Package monitoring checks the chart's dashboard and alerts with Prometheus' promtool. It starts nothing. TestMonitoring of package e2e
// shows both to a real Prometheus.
package monitoring
