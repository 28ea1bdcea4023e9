//! The same table against a real Envoy, with the differences.
//!
//! `make compare-identity` prints it. [`crate::table`] tests the gateway's result for each case, so
//! only Envoy runs here.

use std::fmt::Write as _;

use crate::cases::{ADMITTED, Case, cases};
use crate::peer::{Received, connect};
use crate::pki::Pki;
use crate::process::{self, Envoy};
use crate::support::{CLIENT, GATEWAY, Identities, Net, run};

/// Cases that the gateway admits although Envoy does not, with the reason why that is correct.
const EXPLAINED: &[(&str, &str)] = &[
    ("a P-521 leaf", "Envoy offers no scheme for it"),
    ("an Ed25519 leaf", "Envoy offers no scheme for it"),
    ("an expired root", "a root is trusted for its key: the operator's word"),
];

/// Returns none for each peer that Envoy admits, and the alert for others.
async fn ask(pki: &Pki, cases: &[Case], program: &std::path::PathBuf) -> Vec<Option<String>> {
    let net = Net::new();
    let mut identities = Identities::new();
    let usual = identities.client(CLIENT, GATEWAY);
    let leaf = identities.leaf(GATEWAY);
    identities.root += &pki.trusted();
    let folder = tempfile::tempdir().expect("a folder");
    let roots = folder.path().join("roots.crt");
    std::fs::write(&roots, &identities.root).expect("a file");
    let roots = roots.to_str().expect("a plain path").to_owned();
    let names = [("ROOTS", roots)];
    let config = (include_str!("envoy.yaml"), &names[..]);
    let _envoy = Envoy::start(program, net, 1, &leaf, config).await;
    let mut answers = Vec::new();
    for case in cases {
        let received = connect(net.address(1, 15008), &usual, &case.shown).await;
        answers.push(match received {
            Received::Admitted(_) => None,
            Received::Alert(alert) => Some(format!("{alert:?}")),
            Received::Closed(error) => Some(error),
        });
    }
    answers
}

fn explanation(case: &Case) -> Option<&'static str> {
    let found = EXPLAINED.iter().find(|(name, _)| *name == case.name);
    found.map(|(_, why)| *why)
}

#[test]
fn the_gateway_lets_nobody_in_whom_envoy_refuses_but_for_a_reason() {
    run(async {
        let Some(program) = process::program("certificates at an Envoy") else {
            return;
        };
        let pki = Pki::new();
        let cases = cases(&pki);
        let answers = ask(&pki, &cases, &program).await;
        let (mut table, mut looser, mut stricter) = (String::new(), 0, 0);
        let mut unexplained = Vec::new();
        for (case, answer) in cases.iter().zip(&answers) {
            let admitted = case.expected == ADMITTED;
            if admitted == answer.is_none() {
                continue;
            }
            let answer = answer.as_deref().unwrap_or(ADMITTED);
            let why = if admitted {
                looser += 1;
                let why = explanation(case);
                if why.is_none() {
                    unexplained.push((case.name, answer));
                }
                why.unwrap_or("?")
            } else {
                stricter += 1;
                ""
            };
            let (name, expected) = (case.name, case.expected);
            let line = format!("{name:42} {expected:17} {answer:20} {why}");
            let _ = writeln!(table, "{}", line.trim_end());
        }
        if std::env::var_os("STRAIT_SHOW").is_some_and(|show| show == "1") {
            let version = process::version(&program).await;
            let head = format!("{:42} {:17} Envoy {version}", "certificate", "Strait");
            process::print_uncaptured(&format!("\n{head}\n{}", table.trim_end()));
        }
        let (all, differ) = (cases.len(), stricter + looser);
        process::print_uncaptured(&format!(
            "\n{differ} of {all} certificates differ: Strait refuses {stricter} that Envoy admits, \
             and admits {looser} that Envoy refuses"
        ));
        assert!(unexplained.is_empty(), "{unexplained:?}");
        assert_eq!(looser, EXPLAINED.len(), "an explanation without a case");
    });
}
