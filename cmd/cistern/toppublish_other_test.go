//go:build !linux

package main

func publishForTop(string) {}
