package protocol

// ObjectName names an object: names are a user's own.
type ObjectName struct {
	UID  uint32 `json:"uid"`
	Name string `json:"name"`
}

// ObjectSpec is what a process says of an object that it builds, as the JSON of a Build.
type ObjectSpec struct {
	Name   string            `json:"name"`
	Mode   uint32            `json:"mode,omitempty"`  // as of a file: 0600, with read rights for the group (040) and others (004)
	TTL    float64           `json:"ttl_s,omitempty"` // seconds after its last use; 0 is without end
	Labels map[string]string `json:"labels,omitempty"`
}

// Codes of an End that has the Text of an error, in Keep.
const (
	CodeOther = iota
	CodeNotFound
	CodeDenied
	CodeLimit
	CodeOutOfMemory
)

// The states of an object.
const (
	ObjectBuilding  = "building"
	ObjectCommitted = "committed"
	ObjectRemoved   = "removed" // readers still have it
)

// Object is what is listed of a generation of an object, as the JSON of an Item.
type Object struct {
	Name       string            `json:"name"`
	UID        uint32            `json:"uid"`
	GID        uint32            `json:"gid"`
	Generation uint64            `json:"generation"`
	State      string            `json:"state"`
	Device     string            `json:"device"` // UUID
	Bytes      uint64            `json:"bytes"`  // of the contents
	Reserved   uint64            `json:"reserved_bytes"`
	Mode       uint32            `json:"mode"`
	TTL        float64           `json:"ttl_s,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
	Layout     string            `json:"layout_sha256"`
	Contents   string            `json:"contents_sha256,omitempty"` // where the writer gave it
	Readers    int               `json:"readers"`                   // connections that have pinned it
	PID        int               `json:"pid"`                       // of the writer
	Created    int64             `json:"created_unix"`              // seconds
}
