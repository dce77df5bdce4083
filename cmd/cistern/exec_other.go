//go:build !unix

package main

func execve(path string, args, env []string) error { return errNotLinux }
