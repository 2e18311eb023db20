package onceqcron_test

import (
	"fmt"
	"time"

	"github.com/onceq/onceq"
	"github.com/onceq/onceq/onceqcron"
)

func ExampleSchedule_jobFor() {
	report := onceq.Kind[string]{Name: "report"}
	daily := onceqcron.Schedule{
		Name: "daily-report", Spec: "0 2 * * *", Zone: "Europe/Berlin",
		JobFor: func(t onceqcron.Tick) (onceq.Job, error) {
			yesterday := t.At.AddDate(0, 0, -1) // t.At is in Berlin
			return report.Job(yesterday.Format(time.DateOnly)), nil
		},
	}

	berlin, err := time.LoadLocation(daily.Zone)
	if err != nil {
		panic(err)
	}
	job, err := daily.JobFor(onceqcron.Tick{Schedule: daily.Name, At: time.Date(2026, 3, 29, 3, 0, 0, 0, berlin)})
	fmt.Println(job.Kind, job.Payload, err)
	// Output: report 2026-03-28 <nil>
}

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
