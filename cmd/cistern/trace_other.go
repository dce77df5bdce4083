//go:build !linux

package main

import "os"

func monotonic() int64 { return 0 }

func (t *tracing) passSignals() func() { return func() {} }

func adopt() error { return nil }

func (t *tracing) waitForOthers() {}

func running(uint32, string) bool { return false }

func exitStatus(s *os.ProcessState) int { return s.ExitCode() }
