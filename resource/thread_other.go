//go:build !linux

package resource

import "os"

// threadID is the process's number, where threads have none that Go can ask for.
func threadID() int { return os.Getpid() }
