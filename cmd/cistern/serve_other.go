//go:build !linux

package main

import "context"

func (*app) serve(context.Context, *serveFlags) error { return errNotLinux }

func nodeSockets() []string { return nil }
