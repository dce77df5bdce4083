//go:build !linux || !cgo

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "libcistern is for Linux, built with cgo: CGO_ENABLED=1 go build -buildmode=c-shared")
	os.Exit(1)
}
