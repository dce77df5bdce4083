package recording

// Identity is the process of a job that a recording is of. "" and -1 are unknown. Package identity finds it.
type Identity struct {
	Job      string `json:"job"`      // the scheduler's name of the job, the same on all ranks
	Run      string `json:"run"`      // the launcher's name of the run, where it has one beside the job's
	Requeue  int    `json:"requeue"`  // how often the scheduler started the job anew
	Restart  int    `json:"restart"`  // how often the launcher restarted the ranks
	Launcher string `json:"launcher"` // that the rank is of: "torchrun", "slurm", "openmpi", "mpi", "kubernetes", "cistern"

	Commit string `json:"commit,omitempty"` // version of the program, as its user names it

	Node      string `json:"node"` // name of the host
	NodeRank  int    `json:"node_rank"`
	Rank      int    `json:"rank"`
	LocalRank int    `json:"local_rank"`
	World     int    `json:"world_size"`
	PID       int    `json:"pid"`

	// Coordinates are the process's places in the dimensions of its job, such as "dp", "tp" and "pp".
	Coordinates map[string]int `json:"coordinates,omitempty"`
	// Disagreements are what the variables of several launchers contradict each other in, a sentence each.
	Disagreements []string `json:"disagreements,omitempty"`
}
