// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	"github.com/go-logr/logr"
)

// toolkitLogger logs the printf-style messages of NVIDIA's container toolkit. It warns about each optional file that a driver
// lacks, so all messages are debug output; real errors are returned.
type toolkitLogger struct{ logger logr.Logger }

func (l toolkitLogger) log(format string, args []any) {
	if l.logger.Enabled() {
		l.logger.Info("Container toolkit", "message", fmt.Sprintf(format, args...))
	}
}

func (l toolkitLogger) Debugf(format string, args ...any)   { l.log(format, args) }
func (l toolkitLogger) Errorf(format string, args ...any)   { l.log(format, args) }
func (l toolkitLogger) Infof(format string, args ...any)    { l.log(format, args) }
func (l toolkitLogger) Warningf(format string, args ...any) { l.log(format, args) }
func (l toolkitLogger) Tracef(format string, args ...any)   { l.log(format, args) }
