package onceqcron_test

import (
	"fmt"
	"time"

	"github.com/onceq/onceq/onceqcron"
)

func ExampleParse() {
	lastWorkday, err := onceqcron.Parse("0 18 LW * *", "Europe/Berlin")
	if err != nil {
		panic(err)
	}
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for range 3 {
		at = lastWorkday.Next(at)
		fmt.Println(at.Format("Mon 2006-01-02 15:04 MST"))
	}
	_, err = onceqcron.Parse("0 25 * * *", "UTC")
	fmt.Println(err)
	// Output:
	// Fri 2026-01-30 18:00 CET
	// Fri 2026-02-27 18:00 CET
	// Tue 2026-03-31 18:00 CEST
	// onceqcron: specification "0 25 * * *": field 2, the hour, is "25": 25 is too large; possible are 0 to 23
}
