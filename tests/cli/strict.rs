//! `strait check --strict`, its report as JSON, and the spellings of JSON of all commands.

use crate::check::{GOOD, GOOD_MESH, planted};
use crate::doctor::admin;
use crate::support::{folder_with_certificates, run, run_command, write};

#[test]
fn warnings_are_mistakes_with_strict_and_every_finding_is_in_the_json() {
    run(async {
        let folder = folder_with_certificates().await;
        let folder = folder.path();
        write(folder, "strait.yaml", GOOD);
        write(folder, "mesh.yaml", GOOD_MESH);
        let check = async |more: &[&str]| run_command(folder, &[&["check"], more].concat()).await;
        let json = async |more: &[&str]| {
            let checked = check(&[&["-o", "json"], more].concat()).await;
            assert_eq!(checked.stderr, "", "{checked:?}");
            let page: serde_json::Value = serde_json::from_str(&checked.stdout).expect("JSON");
            (checked.code, page)
        };
        assert_eq!(check(&["--strict"]).await.code, Some(0));
        let (code, page) = json(&["--strict"]).await;
        assert_eq!((code, &page["ok"]), (Some(0), &true.into()), "{page}");
        assert_eq!(page["counts"]["workloads"], 1, "{page}");

        let warned = planted(GOOD, &[(1, "cluster: east", "cluster: esat")]);
        write(folder, "strait.yaml", &warned);
        let checked = check(&[]).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        assert!(checked.stderr.contains("strait.yaml:1: warning: "), "{checked:?}");
        let checked = check(&["--strict"]).await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(checked.stderr.ends_with("mistake with --strict\n"), "{checked:?}");
        for (strict, code) in [(&[][..], 0), (&["--strict"][..], 1)] {
            let (exit, page) = json(strict).await;
            assert_eq!((exit, &page["ok"]), (Some(code), &(code == 0).into()), "{page}");
            let finding = &page["findings"][0];
            assert_eq!(finding["severity"], "warning", "{page}");
            assert_eq!((&finding["file"], &finding["line"]), (&"strait.yaml".into(), &1.into()));
        }

        let wrong = planted(GOOD, &[(1, "cluster", "clutser")]);
        write(folder, "strait.yaml", &wrong);
        let (code, page) = json(&[]).await;
        assert_eq!((code, &page["ok"]), (Some(1), &false.into()), "{page}");
        assert_eq!(page["findings"][0]["severity"], "error", "{page}");

        // Certificates are elsewhere, which is no mistake.
        write(folder, "strait.yaml", GOOD);
        std::fs::remove_dir_all(folder.join("certs")).expect("no certificates");
        let checked = check(&["--strict"]).await;
        assert!(checked.stderr.contains("certificates were not checked"), "{checked:?}");
        assert_eq!(checked.code, Some(0), "{checked:?}");
    });
}

#[test]
fn every_command_with_json_takes_each_spelling_of_it() {
    run(async {
        let folder = folder_with_certificates().await;
        let folder = folder.path();
        write(folder, "strait.yaml", GOOD);
        write(folder, "mesh.yaml", GOOD_MESH);
        let address = admin("{\"page\": 1}".to_owned()).await;
        let explain = "explain -c strait.yaml --from spiffe://west.local/ns/shop/sa/a --to \
                       echo.app.svc.cluster.local:80";
        for command in [
            "check -c strait.yaml".to_owned(),
            explain.to_owned(),
            format!("status --admin {address}"),
            format!("status peers --admin {address}"),
            format!("status refusals --admin {address}"),
        ] {
            let command: Vec<_> = command.split(' ').collect();
            let mut outputs = Vec::new();
            for spelling in ["-o json", "--output json", "--format json", "--json"] {
                let spelling: Vec<_> = spelling.split(' ').collect();
                let done = run_command(folder, &[&command[..], &spelling].concat()).await;
                let page = serde_json::from_str::<serde_json::Value>(&done.stdout);
                assert!(page.is_ok_and(|page| page.is_object()), "{command:?}: {done:?}");
                outputs.push(done.stdout);
            }
            outputs.dedup();
            assert_eq!(outputs.len(), 1, "{command:?}: {outputs:?}");
        }
        // Those that take longer know the option too.
        for command in ["doctor", "demo", "conformance", "load rr"] {
            let words = command.split(' ').chain(["-o", "yaml"]);
            let refused = run_command(folder, &words.collect::<Vec<_>>()).await;
            let named = "invalid value 'yaml' for '--output <FORMAT>'";
            assert!(refused.stderr.contains(named), "{command}: {refused:?}");
        }
    });
}
