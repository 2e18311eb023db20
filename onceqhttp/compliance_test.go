package onceqhttp_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq/onceqhttp"
	"github.com/onceq/onceq/queuetest"
)

// Each row of the tables in COMPLIANCE.md names existing tests in its last cell.
func TestCompliance_EachRowNamesItsTest(t *testing.T) {
	t.Parallel()
	tests := make(map[string]bool)
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, f := range files {
		source, err := os.ReadFile(f)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`).FindAllStringSubmatch(string(source), -1) {
			tests[m[1]] = true
		}
	}
	page, err := os.ReadFile("COMPLIANCE.md")
	require.NoError(t, err)
	rows := 0
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 3 || strings.HasPrefix(cells[0], "---") || strings.TrimSpace(cells[2]) == "test" {
			require.NotContains(t, line, "`Test", "a row with other than three cells")
			continue
		}
		rows++
		named := regexp.MustCompile("`(Test\\w+)`").FindAllStringSubmatch(cells[2], -1)
		require.NotEmpty(t, named, line)
		for _, m := range named {
			require.True(t, tests[m[1]], "%s is no test", m[1])
		}
	}
	require.Equal(t, 27, rows)
}

// The codes of the table of problems are those of the package.
func TestCompliance_EachCodeIsDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/use/http.md")
	require.NoError(t, err)
	source, err := os.ReadFile("problem.go")
	require.NoError(t, err)
	codes := regexp.MustCompile(`= "(IDEMPOTENCY_\w+)"`).FindAllStringSubmatch(string(source), -1)
	require.Len(t, codes, 14)
	for _, c := range codes {
		require.Contains(t, string(page), "\n| `"+c[1]+"` |")
	}
}

func TestCompliance_TheDraftsRequest(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	s := serve(t, "POST /foo/bar", middleware(t, db.Queue, onceqhttp.Config{Principal: onceqhttp.Public}).Handler(newRuns().answering(201)))
	const request = "POST /foo/bar HTTP/1.1\r\nHost: example.com\r\nIdempotency-Key: \"8e03978e-40d5-43e8-bc93-6894a57f9324\"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
	const first = "HTTP/1.1 201 Created\nContent-Length: 4\nContent-Type: text/plain\nConnection: close\n\n1:{}"
	require.Equal(t, first, raw(t, s.Listener.Addr().String(), request))
	require.Equal(t, strings.Replace(first, "Content-Type: text/plain\n", "Content-Type: text/plain\nIdempotent-Replayed: true\n", 1),
		raw(t, s.Listener.Addr().String(), request))
	require.Equal(t, "8e03978e-40d5-43e8-bc93-6894a57f9324", sqlOne[string](t, db, `select key from onceq.job_fences where class = 2`))
}

func TestCompliance_StripesRequest(t *testing.T) {
	t.Parallel()
	db := queuetest.New(t)
	ran := newRuns()
	s := serve(t, "POST /v1/customers", middleware(t, db.Queue, onceqhttp.Config{Principal: onceqhttp.Public}).Handler(ran.answering(200)))
	form := []string{"Content-Type", "application/x-www-form-urlencoded"}
	for i := range 3 {
		a := post(t, s.URL+"/v1/customers", "KG5LxwFBepaKHyUD", "description=My+First+Test+Customer", form...)
		require.Equal(t, "1:description=My+First+Test+Customer", a.body)
		require.Equal(t, i > 0, a.replayed())
	}
	refused(t, post(t, s.URL+"/v1/customers", "KG5LxwFBepaKHyUD", "description=Another", form...), 422, onceqhttp.CodeMismatch)
	post(t, s.URL+"/v1/customers", "AnotherKey", "description=Another", form...)
	require.Equal(t, 2, ran.count())
}
