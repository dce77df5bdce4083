//go:build !linux

package main

import "os"

func monotonic() int64 { return 0 }

func catchSignals() chan os.Signal { return make(chan os.Signal) }

func (p *child) passSignals(chan os.Signal) func() { return func() {} }

func adopt() error { return nil }

func (t *tracing) waitForOthers() {}

func running(uint32, string) bool { return false }

func below(uint32) bool { return false }

func hostNumbers() bool { return false }

func exitStatus(s *os.ProcessState) int { return s.ExitCode() }
