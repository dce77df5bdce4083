//go:build lockrank

package lockrank

func init() { Check() }
