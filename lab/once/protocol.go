package main

// A story talks to the processes of a system in lines of JSON: commands to a process's standard input, messages
// from its standard output. README.md has them as a table, for adapters in other languages.

// job is what a story enqueues. What a system does not have it says by an answer with Missing.
type job struct {
	N        int    `json:"n"`                  // its payload: the number of the row that its handler writes
	Key      string `json:"key,omitempty"`      // names the work; "" for none
	Life     life   `json:"life,omitempty"`     // how long the key is to be taken; only with a key
	Kind     string `json:"kind,omitempty"`     // default "work"
	Queue    string `json:"queue,omitempty"`    // default "default"
	Delay    int    `json:"delay,omitempty"`    // milliseconds
	Attempts int    `json:"attempts,omitempty"` // at most so many; 0: the system's default
	Lane     string `json:"lane,omitempty"`     // at most one job of a lane at once
	Limit    string `json:"limit,omitempty"`    // at most two jobs of a limit at once
	Rate     string `json:"rate,omitempty"`     // at most four jobs of a rate start within three seconds
	Group    string `json:"group,omitempty"`    // the last job of a call with a group runs when the others are finished
}

func (j job) kind() string {
	if j.Kind == "" {
		return "work"
	}
	return j.Kind
}

func (j job) queue() string {
	if j.Queue == "" {
		return "default"
	}
	return j.Queue
}

// life is how long a key is taken.
type life string

const (
	untilDone life = "done" // until its job is finished
	aDay      life = "day"  // a day longer
	forEver   life = "ever"
)

// answer is what the caller of an enqueue is told about one job.
type answer struct {
	ID        string `json:"id"`
	Duplicate bool   `json:"duplicate,omitempty"` // and the caller is told so
	State     string `json:"state,omitempty"`     // of the job that has the key, if the caller is told: "dead", "running" …
	Result    string `json:"result,omitempty"`    // of the job that has the key, if the caller is told
}

// crew is how a process works.
type crew struct {
	Kinds      []string `json:"kinds,omitempty"`      // that it has handlers for; default "work"
	Queues     []string `json:"queues,omitempty"`     // default "default"
	AtOnce     int      `json:"at_once,omitempty"`    // handlers; default 4
	Unsure     bool     `json:"unsure,omitempty"`     // calls go to a provider that does not recognise repetitions
	StopWithin int      `json:"stop_within,omitzero"` // milliseconds that a handler has when the worker stops; default 10,000
	Every      int      `json:"every,omitzero"`       // seconds: the process has a schedule that enqueues a job with n = 1, at each such time on the clock
}

func (c crew) kinds() []string {
	if len(c.Kinds) == 0 {
		return []string{"work"}
	}
	return c.Kinds
}

func (c crew) queues() []string {
	if len(c.Queues) == 0 {
		return []string{"default"}
	}
	return c.Queues
}

// command is what a process is told to do.
type command struct {
	ID   int    `json:"id"`
	Do   string `json:"do"`
	Tx   string `json:"tx,omitempty"`   // begin, row, enqueue, commit, rollback: which transaction; "" for none
	Jobs []job  `json:"jobs,omitempty"` // enqueue
	Crew *crew  `json:"crew,omitempty"` // work
	Run  int    `json:"run,omitempty"`  // the steps of a handler: write, call, end, finish, fail, called
	N    int    `json:"n,omitempty"`    // row, write
	Name string `json:"name,omitempty"` // call; cancel: the job's id; finish: the job's result
	Bad  string `json:"bad,omitempty"`  // called: the error that the provider answers with
}

// message is what a process says: the answer to a command, or an event.
type message struct {
	ID      int      `json:"id,omitempty"`      // of the command that this answers
	Error   string   `json:"error,omitempty"`   // what the caller is told
	Missing string   `json:"missing,omitempty"` // the system has no such thing: a sentence for the table
	Ended   bool     `json:"ended,omitempty"`   // the handler had already ended
	Answers []answer `json:"answers,omitempty"` // enqueue
	Left    int      `json:"left,omitempty"`    // left: jobs that are not finished

	Event   string `json:"event,omitempty"` // ready; started: a handler; called: a handler calls a provider
	Run     int    `json:"run,omitempty"`
	N       int    `json:"n,omitempty"`       // the job's
	Attempt int    `json:"attempt,omitempty"` // 1 for the first, as far as the system knows
	Name    string `json:"name,omitempty"`    // of a call
	Key     string `json:"key,omitempty"`     // by which the provider may recognise the call; "" for none
}
