//! `strait status` and `strait dump` where nobody answers, or somebody else does.

use std::net::TcpListener;

use crate::support::{done, run};

#[test]
fn where_nobody_answers_it_says_so_and_exits_with_2() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        // A port that was just free.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        drop(listener);
        for command in ["status", "dump"] {
            let asked = done(folder.path(), &[command, "--admin", &address]).await;
            assert_eq!((asked.code, &*asked.stdout), (Some(2), ""), "{command}");
            let said = format!("cannot ask a gateway at {address}");
            assert!(asked.stderr.contains(&said), "{asked:?}");
            assert!(asked.stderr.contains("refused"), "{asked:?}");
            assert_eq!(asked.stderr.lines().count(), 1, "{asked:?}");
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
            &["dump", "a"],
        ] {
            let asked = done(folder.path(), args).await;
            assert_eq!(asked.code, Some(2), "{asked:?}");
        }
    });
}
