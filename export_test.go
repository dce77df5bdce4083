package cistern

// SetStretch makes little memory several stretches, until the function that it returns is called.
func SetStretch(bytes uint64) (restore func()) {
	old := stretch
	stretch = bytes
	return func() { stretch = old }
}
