package protocol

// Device is what is listed of a device, as the JSON of an Item: sums over all clients, also those that a user may not see.
type Device struct {
	Device   string `json:"device"` // UUID
	Total    uint64 `json:"total_bytes"`
	Clients  int    `json:"clients"`
	Reserved uint64 `json:"reserved_bytes"`
	Active   uint64 `json:"active_bytes"`
	Cached   uint64 `json:"cached_bytes"`
	Paused   uint64 `json:"paused_bytes"`
	Pausable uint64 `json:"pausable_bytes"` // in use, that clients let the broker pause for others
	Spare    uint64 `json:"spare_bytes"`    // that clients would be asked for now
	Granted  uint64 `json:"granted_bytes"`  // granted and not yet created
	// Objects are the generations of named objects on the device, and ObjectBytes their memory, which no client has.
	Objects     int    `json:"objects,omitempty"`
	ObjectBytes uint64 `json:"object_bytes,omitempty"`
	Load
}

// Load is what was asked for on a device since the broker began.
type Load struct {
	Waiting   int     `json:"waiting"`    // questions that are not answered yet
	Met       uint64  `json:"met"`        // questions that were granted what they asked for
	Partly    uint64  `json:"partly_met"` // a part of it
	Unmet     uint64  `json:"unmet"`      // nothing
	Abandoned uint64  `json:"abandoned"`  // the client ended, or had the memory meanwhile
	Refaults  uint64  `json:"refaults"`   // questions of clients that had given memory a moment before
	Missed    uint64  `json:"missed"`     // requests to release memory that were not answered
	Given     uint64  `json:"given_bytes"`
	Pauses    uint64  `json:"pauses"`     // of clients, for others
	Pressure  float64 `json:"pressure_s"` // time with at least one question that was not answered
}

// PauseResult is what a client did about Pause or Resume on a device, as the JSON of an Item.
type PauseResult struct {
	Client  uint64  `json:"client"`
	PID     int     `json:"pid"`
	Name    string  `json:"name"`
	Label   string  `json:"label"`
	Device  string  `json:"device"` // UUID
	Bytes   uint64  `json:"bytes"`  // physical memory that was returned, or allocated again
	Seconds float64 `json:"seconds"`
	Error   string  `json:"error,omitempty"`
	// Denied reports that the error is that the program does not allow it now.
	Denied bool `json:"denied,omitempty"`
}
