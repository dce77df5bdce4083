// Package analyze answers questions about a recorded run: what was live at the peak, and its stacks (Inspect), where
// it lay (MapAt), from when to when each block was there (LifetimesOf), how memory went over time (RecordedCurves), why
// a request failed (ExplainRecorded, ExplainReplayed), and which settings would have served the run better (Tune). It
// draws nothing: report, and later top and the out-of-memory report of the engine, show what it finds.
//
// Everything here reads a recording.Trace and never changes it, so that any number of questions may be asked of one trace
// at once. There are no locks; Tune runs replays on several goroutines and joins them before it returns.
//
// Words are DESIGN's: live bytes are requested bytes from alloc to free_completed; reserved bytes are held from the
// driver. All sizes are bytes, all times microseconds.
package analyze
