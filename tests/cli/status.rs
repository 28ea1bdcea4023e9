//! `strait status` and `strait dump` without an answer, or with an answer of another program.

use std::net::TcpListener;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{run, run_command};

#[test]
fn where_nobody_answers_it_says_so_and_exits_with_2() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        // A port that was just free.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        drop(listener);
        for command in ["status", "dump", "explain", "top --once"] {
            let words = command.split(' ').chain(["--admin", &address]);
            let args: Vec<_> = words.collect();
            let requested = run_command(folder.path(), &args).await;
            assert_eq!((requested.code, &*requested.stdout), (Some(2), ""), "{command}");
            let reported = format!("request to the admin port at {address} failed");
            assert!(requested.stderr.contains(&reported), "{requested:?}");
            assert!(requested.stderr.contains("refused"), "{requested:?}");
            assert_eq!(requested.stderr.lines().count(), 1, "{requested:?}");
        }
    });
}

#[test]
fn a_port_that_knows_nothing_of_it_is_no_admin_port() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        // As the metrics port answers.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut requested = [0; 1024];
                let _ = stream.read(&mut requested).await;
                let answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
                let _ = stream.write_all(answer).await;
            }
        });
        for command in [
            &["status"][..],
            &["status", "echo"],
            &["status", "peers"],
            &["status", "refusals"],
            &["dump"],
        ] {
            let args = [command, &["--admin", &address]].concat();
            let requested = run_command(folder.path(), &args).await;
            assert_eq!((requested.code, &*requested.stdout), (Some(2), ""), "{requested:?}");
            assert!(requested.stderr.contains("not an admin port"), "{requested:?}");
        }
    });
}

#[test]
fn arguments_that_nobody_knows_exit_with_2() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        for args in [
            &["status", "--what"][..],
            &["status", "a", "b"],
            &["status", "peers", "a"],
            &["dump", "a"],
        ] {
            let requested = run_command(folder.path(), args).await;
            assert_eq!(requested.code, Some(2), "{requested:?}");
        }
    });
}
