package recording

// Environment is what a run was recorded with, as far as its recorder noted it; `cistern record` does. "" and 0 are
// unknown.
type Environment struct {
	PyTorch     string `json:"pytorch,omitempty"` // torch.__version__
	CUDA        string `json:"cuda,omitempty"`    // the version that PyTorch was built for
	Driver      string `json:"driver,omitempty"`
	Device      string `json:"device_name,omitempty"`
	DeviceTotal uint64 `json:"device_total_bytes,omitempty"`
}
