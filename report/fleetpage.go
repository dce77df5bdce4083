package report

import (
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/cistern-gpu/cistern/fleet"
)

// fleetColumns is how many columns the heat map of a job has at most.
const fleetColumns = 256

// fleetView is what the page of a job embeds: web/src/fleet.js reads it. Rows of the grid are in base64.
type fleetView struct {
	Answer    *fleet.Answer  `json:"answer"`
	Steps     []int64        `json:"steps"`
	Reserved  [][]byte       `json:"reserved"`
	Allocated [][]byte       `json:"allocated"`
	Envelopes fleetEnvelopes `json:"envelopes"`
	// Reports are HTML reports of ranks that lie beside their recordings, relative to the page, by index of Answer.Ranks.
	Reports map[int]string `json:"reports"`
}

type fleetEnvelopes struct {
	Reserved  [3][]uint64 `json:"reserved"`
	Allocated [3][]uint64 `json:"allocated"`
}

// WriteFleetPage writes the page of a job: one HTML file, which links to reports of ranks where there are some. page is where it will
// lie, for these links.
func WriteFleetPage(w io.Writer, a *fleet.Answer, page string) error {
	b, err := loadBundle(dist)
	if err != nil {
		return err
	}
	g := a.Grid(fleetColumns)
	v := fleetView{Answer: a, Steps: g.Steps, Reserved: g.Reserved, Allocated: g.Allocated,
		Envelopes: fleetEnvelopes{g.ReservedEnvelope, g.AllocatedEnvelope}, Reports: map[int]string{}}
	for i := range a.Ranks {
		if file := htmlReport(&a.Ranks[i]); file != "" {
			if rel, err := filepath.Rel(filepath.Dir(page), file); err == nil {
				v.Reports[i] = filepath.ToSlash(rel)
			}
		}
	}
	title := "Job - Cistern"
	if a.Job != "" {
		title = "Job " + a.Job + " - Cistern"
	}
	return writeData(w, b, title, "fleet", v, nil)
}

// htmlReport is a report of a rank that lies beside the file that says most of it, else beside its newest recording, under that name
// and .html.
func htmlReport(r *fleet.RankAnswer) string {
	var files []string
	for _, name := range r.Recordings {
		files = append(files, filepath.Join(filepath.Dir(r.File), name))
	}
	if r.Report != "" {
		files = append(files, r.Report)
	}
	for _, file := range slices.Backward(files) {
		if st, err := os.Stat(file + ".html"); err == nil && st.Mode().IsRegular() {
			return file + ".html"
		}
	}
	return ""
}
