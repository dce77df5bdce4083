//go:build unix

package dump

import (
	"os/exec"
	"syscall"
)

// alone has a child live on when the terminal or the session of its parent goes.
func alone(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
