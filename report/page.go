package report

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"io/fs"
	"strings"
)

//go:embed all:dist
var dist embed.FS

// ErrNoBundle says that this binary was built without the page's front end.
var ErrNoBundle = errors.New("this cistern was built without the HTML report: run `make build` and use bin/cistern")

// bundle is the page's script, style and the licences of what is in them.
type bundle struct{ script, style, licences string }

func loadBundle(files fs.FS) (bundle, error) {
	var b bundle
	for name, to := range map[string]*string{"page.js": &b.script, "page.css": &b.style, "LICENSES.txt": &b.licences} {
		data, err := fs.ReadFile(files, "dist/"+name)
		if errors.Is(err, fs.ErrNotExist) {
			return b, ErrNoBundle
		}
		if err != nil {
			return b, fmt.Errorf("reading the HTML report's front end: %w", err)
		}
		*to = strings.TrimSpace(string(data))
	}
	return b, nil
}

// CheckBundle fails with ErrNoBundle where WritePage would: before the work whose result would be shown.
func CheckBundle() error {
	_, err := loadBundle(dist)
	return err
}

// WritePage writes the page of some traces: one HTML file that needs nothing else.
func WritePage(w io.Writer, views []*View) error {
	b, err := loadBundle(dist)
	if err != nil {
		return err
	}
	return writePage(w, b, views)
}

func writePage(w io.Writer, b bundle, views []*View) error {
	var long []longData
	for _, v := range views {
		long = append(long, v.long)
	}
	title := "Cistern"
	if len(views) == 1 {
		title = views[0].Name + " - Cistern"
	}
	return writeData(w, b, title, "traces", views, long)
}

// WriteDifferencePage writes the page of what grew between two runs, for each device that both have.
func WriteDifferencePage(w io.Writer, views []*DifferenceView) error {
	b, err := loadBundle(dist)
	if err != nil {
		return err
	}
	var long []longData
	for _, v := range views {
		long = append(long, v.long)
	}
	return writeData(w, b, "Growth - Cistern", "differences", views, long)
}

// writeData writes a page around data, which are under a name of what is shown, and the long data of each of them.
func writeData(w io.Writer, b bundle, title, name string, views any, long []longData) error {
	// encoding/json writes <, > and & as escapes, so that nothing in the data can end the script element.
	data, err := json.Marshal(map[string]any{name: views})
	if err != nil {
		return fmt.Errorf("writing the HTML report's data: %w", err)
	}
	// The policy names the script and the style by hash; "</" in either would end its element.
	script := strings.ReplaceAll(b.script, "</script", `<\/script`)
	style := strings.ReplaceAll(b.style, "</style", `<\/style`)
	policy := fmt.Sprintf("default-src 'none'; script-src '%s'; style-src '%s'; img-src data:; base-uri 'none'; "+
		"form-action 'none'", hashSource(script), hashSource(style))
	var head bytes.Buffer
	fmt.Fprintf(&head, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"+
		"<meta http-equiv=\"Content-Security-Policy\" content=\"%s\">\n"+
		"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>%s</title>\n"+
		"<link rel=\"icon\" href=\"data:,\">\n<!--\n%s\n-->\n<style>%s</style>\n</head>\n<body>\n"+
		"<div id=\"cistern-page\"><noscript>This page draws itself with a script.</noscript></div>\n",
		html.EscapeString(policy), html.EscapeString(title), strings.ReplaceAll(b.licences, "--", "- -"), style)
	fmt.Fprintf(&head, "<script type=\"application/json\" id=\"cistern-data\">%s</script>\n", data)
	if _, err := w.Write(head.Bytes()); err != nil {
		return err
	}
	for i, l := range long {
		if err := writeLong(w, "series", i, l.series); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(w, "<script>%s</script>\n", script); err != nil {
		return err
	}
	// The script draws the chart while a browser still reads these.
	for i, l := range long {
		if err := errors.Join(writeLong(w, "curves", i, l.curves), writeLong(w, "tables", i, l.tables)); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, "</body>\n</html>\n")
	return err
}

// writeLong writes long data of a view, if there are any.
func writeLong(w io.Writer, name string, view int, text string) error {
	if text == "" {
		return nil
	}
	_, err := fmt.Fprintf(w, "<script type=\"text/plain\" id=\"cistern-%s-%d\">%s</script>\n", name, view, text)
	return err
}

// hashSource is how a content security policy names an inline script or style.
func hashSource(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256-" + base64.StdEncoding.EncodeToString(sum[:])
}
