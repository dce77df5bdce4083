package fleet

// Tuning is what settings would do for all ranks.
type Tuning struct{}
