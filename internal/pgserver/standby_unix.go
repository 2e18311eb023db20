//go:build unix

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
)

// standby starts a server on a copy of this one's data and lets it follow. It makes the copy with the low-level backup
// API, because not every build of Postgres includes pg_basebackup.
func (b *binaries) standby(ctx context.Context, name string, tablespaces map[string]string, opts Options) (*Server, error) {
	for _, to := range tablespaces {
		if b.user != nil {
			if err := os.Chown(to, int(b.user.Uid), int(b.user.Gid)); err != nil {
				return nil, fmt.Errorf("pgserver: hand %s to user %d: %w", to, b.user.Uid, err)
			}
		}
	}
	conn, err := pgx.Connect(ctx, b.url())
	if err != nil {
		return nil, fmt.Errorf("pgserver: connect to the primary: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()

	// From here on the primary keeps the write-ahead log that the standby will need.
	slot := strings.ToLower(name)
	if _, err := conn.Exec(ctx, `select pg_create_physical_replication_slot($1, true)`, slot); err != nil {
		return nil, fmt.Errorf("pgserver: keep the write-ahead log for the standby: %w", err)
	}
	opts.Settings = maps.Clone(opts.Settings)
	if opts.Settings == nil {
		opts.Settings = map[string]string{}
	}
	opts.Settings["primary_slot_name"] = slot
	server, err := startFilled(ctx, b.bin, b.password, opts, func(s *binaries, ctx context.Context) error {
		if _, err := conn.Exec(ctx, `select pg_backup_start($1, true)`, name); err != nil {
			return fmt.Errorf("pgserver: begin the backup: %w", err)
		}
		if err := s.copyCluster(b.data, tablespaces); err != nil {
			return fmt.Errorf("pgserver: copy the primary's data: %w", err)
		}
		var label string
		if err := conn.QueryRow(ctx, `select labelfile from pg_backup_stop(false)`).Scan(&label); err != nil {
			return fmt.Errorf("pgserver: end the backup: %w", err)
		}
		// Not as an argument, which everybody can see: it contains the password.
		primary := "primary_conninfo = '" + b.url() + "&application_name=" + url.QueryEscape(name) + "'\n"
		return errors.Join(s.write("backup_label", label), s.write("standby.signal", ""), s.write("postgresql.auto.conf", primary))
	})
	if err != nil {
		_, dropErr := conn.Exec(context.WithoutCancel(ctx), `select pg_drop_replication_slot($1)`, slot)
		return nil, errors.Join(err, dropErr)
	}
	return server, nil
}

// notCopied are directories whose contents a copy creates itself, by their path in the data directory.
var notCopied = map[string]bool{
	"pg_wal": true, "pg_replslot": true, "pg_dynshmem": true, "pg_notify": true, "pg_serial": true, "pg_snapshots": true,
	"pg_stat_tmp": true, "pg_subtrans": true,
}

// copyCluster copies the data of a server that may be running, as long as it is in backup mode.
func (b *binaries) copyCluster(from string, tablespaces map[string]string) error {
	wal := filepath.Join(b.dir, "wal")
	if err := b.own(os.MkdirAll(b.data, 0o700), b.data); err != nil {
		return err
	}
	if err := b.own(os.Mkdir(wal, 0o700), wal); err != nil {
		return err
	}
	return b.copyTree(from, b.data, func(path string, d fs.DirEntry) (bool, error) {
		switch dir, name := filepath.Split(path); {
		case path == "pg_wal":
			return true, os.Symlink(wal, filepath.Join(b.data, path))
		case notCopied[filepath.Clean(dir)], path == "postmaster.pid", path == "postmaster.opts", name == "pg_internal.init":
			return true, nil
		case dir == "pg_tblspc/":
			there, err := os.Readlink(filepath.Join(from, path))
			if err != nil {
				return true, err
			}
			here, ok := tablespaces[there]
			if !ok {
				return true, fmt.Errorf("no directory is named for the tablespace in %s", there)
			}
			return true, errors.Join(os.Symlink(here, filepath.Join(b.data, path)), b.copyTree(there, here, nil))
		}
		return false, nil
	})
}

// copyTree copies directories and files, except those that other handles. Files that vanish while it copies were not
// needed.
func (b *binaries) copyTree(from, to string, other func(path string, d fs.DirEntry) (bool, error)) error {
	return filepath.WalkDir(from, func(source string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		}
		path, err := filepath.Rel(from, source)
		if err != nil || path == "." {
			return err
		}
		if other != nil {
			if done, err := other(path, d); done || err != nil {
				if err == nil && d.IsDir() {
					err = filepath.SkipDir
				}
				return err
			}
		}
		target := filepath.Join(to, path)
		if d.IsDir() {
			return b.own(os.Mkdir(target, 0o700), target)
		}
		in, err := os.Open(source)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		}
		defer func() { _ = in.Close() }()
		out, err := os.OpenFile(target, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, in)
		return b.own(errors.Join(err, out.Close()), target)
	})
}

// write creates a file in the data directory.
func (b *binaries) write(name, content string) error {
	path := filepath.Join(b.data, name)
	return b.own(os.WriteFile(path, []byte(content), 0o600), path)
}

// own gives a newly created path to the user that runs the server, unless its creation failed.
func (b *binaries) own(err error, path string) error {
	if err != nil || b.user == nil {
		return err
	}
	return os.Chown(path, int(b.user.Uid), int(b.user.Gid))
}
