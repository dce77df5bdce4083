//go:build !unix

package nopoll

import "os"

// Kept is a file that stays open.
type Kept struct{ *os.File }

// Keep is OpenFile for a file that stays open.
func Keep(name string, flag int, perm os.FileMode) (*Kept, error) {
	f, err := os.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &Kept{f}, nil
}
