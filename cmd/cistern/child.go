package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
)

// child is a program that this process starts and outlives. It has this process's standard streams, and gets the signals
// that this process is sent.
type child struct {
	cmd  *exec.Cmd
	over chan struct{} // closed when the program has ended
	stop chan struct{} // closed by a signal after that
}

// newChild finds the program, as a shell does.
func newChild(args []string, env environment) (child, error) {
	path, err := lookProgram(args[0])
	if err != nil {
		return child{}, err
	}
	cmd := &exec.Cmd{Path: path, Args: args, Env: env, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	return child{cmd, make(chan struct{}), make(chan struct{})}, nil
}

// start starts the program, and passes signals on to it until the function that it returns is called.
func (p *child) start() (func(), error) {
	signals := catchSignals()
	if err := p.cmd.Start(); err != nil {
		signal.Stop(signals)
		return nil, fmt.Errorf("%s: cannot be started: %w", p.cmd.Args[0], noProgram(errors.Unwrap(err)))
	}
	return p.passSignals(signals), nil
}

// wait waits for the program. Its state says how it ended.
func (p *child) wait() {
	_ = p.cmd.Wait()
	close(p.over)
}
