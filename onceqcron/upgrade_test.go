package onceqcron_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/queuetest"
)

const later = "ONCEQ_TEST_LATER" // the path of a migration after the library's own ones

// This code is the older one when the next migration runs: a part of this suite runs on tables with one more migration, which adds
// columns to those of schedules and of their ticks too.
func TestUpgrade_TheSuiteRunsOnLaterTables(t *testing.T) {
	if os.Getenv(later) != "" {
		t.Skip("it does already")
	}
	t.Parallel()
	migration, err := filepath.Abs("../migrations/testdata/002_later.sql")
	require.NoError(t, err)
	queuetest.New(t, queuetest.NoMigrations()) // the other process uses this one's server, if that is possible
	cmd := exec.Command(os.Args[0], "-test.run=^(TestTick_EnqueuesTheJobAndMovesOn|TestMissed|TestRegister_(ManyProcesses|ADeploy).*|TestPauseResumeFireBackfill|TestPause_TheLedgerHasItsTicks|TestPut_InACallersTransaction|TestTick_TheLedgerForgets|TestLater)$", "-test.v", "-test.parallel=4")
	cmd.Env = append(os.Environ(), later+"="+migration)
	out, err := cmd.CombinedOutput()
	said := regexp.MustCompile(`(?m)^.*(_test\.go:\d+: |--- FAIL: |panic: ).*(\n.*){0,8}`).FindAllString(string(out), -1)
	require.NoError(t, err, "%s", strings.Join(said, "\n…\n"))
	require.Contains(t, string(out), "--- PASS: TestLater")
	require.Contains(t, string(out), "--- PASS: TestMissed")
}

// TestLater says whether the tables are later ones.
func TestLater(t *testing.T) {
	if os.Getenv(later) == "" {
		t.Skip("only on later tables")
	}
	db := queuetest.New(t)
	var version int
	require.NoError(t, db.Pool.QueryRow(t.Context(), `select version from onceq.meta where exists (select later from onceq.schedule_ticks) is not null`).Scan(&version))
	require.Greater(t, version, onceq.SchemaVersion)
}
