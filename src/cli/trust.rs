//! `strait trust issuers`: configuration lines for the issuers that a running gateway has seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use serde::de::IgnoredAny;

use super::ask::{Admin, run_admin_command};
use super::text::print;
use crate::admin::IssuerRow;
use crate::admin::pages::StatusPage;
use crate::labels::count;
use crate::wire::UNKNOWN_CLUSTER;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Prints `trust.clusters` with the issuers of the peers that have connected, to be completed
    /// with the names of their clusters.
    ///
    /// An issuer is the intermediate that signed the peers' certificates, or the root if there is
    /// none. To find the cluster of an issuer, compare its subject, or its hash with that of the
    /// cluster's own CA certificate.
    ///
    /// Exits 0 if there is an issuer, 1 if none has been seen, 2 if the gateway does not answer.
    #[command(after_help = "Examples:\n  strait trust issuers\n  \
                            kubectl exec -n istio-system deploy/eastwest -- \
                            /strait trust issuers\n  \
                            openssl x509 -in ca-cert.pem -pubkey -noout | \
                            openssl pkey -pubin -outform DER | sha256sum")]
    Issuers(Admin),
}

/// Requests the issuers and prints them.
pub(super) fn run(command: &Command) -> ExitCode {
    let Command::Issuers(admin) = command;
    run_admin_command(async {
        let answer = admin.request(Method::GET, "/status", &()).await?;
        let page: StatusPage<IgnoredAny> = answer.decode().await?;
        if page.issuers.is_empty() {
            eprintln!("no peer has connected yet; retry after the first connection");
            return Ok(ExitCode::FAILURE);
        }
        print(trust_section(&page.issuers))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Returns the section, with issuers grouped by cluster. Each issuer without a cluster gets a
/// placeholder name of its own.
fn trust_section(issuers: &[IssuerRow]) -> String {
    let mut clusters: BTreeMap<String, Vec<&IssuerRow>> = BTreeMap::new();
    let mut nameless = 0;
    for row in issuers {
        let known = row.cluster.clone().filter(|name| name != UNKNOWN_CLUSTER);
        let name = known.unwrap_or_else(|| {
            nameless += 1;
            format!("CLUSTER-{nameless}")
        });
        clusters.entry(name).or_default().push(row);
    }
    let mut text = String::new();
    if nameless > 0 {
        text.push_str("# Replace each CLUSTER-n by the name of the cluster whose CA it is.\n");
    }
    text.push_str("trust:\n  clusters:\n");
    for (name, rows) in clusters {
        let name = serde_json::Value::from(name);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    - name: {name}\n      issuers:");
        for row in rows {
            let IssuerRow { spki, subject, accepted, refused, .. } = row;
            let _ = writeln!(
                text,
                "        # {subject}: {} accepted, {refused} refused\n        - \"{spki}\"",
                count(accepted, "connection")
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn issuers_of_one_cluster_are_together_and_others_get_a_name_to_replace() {
        let row = |spki: &str, cluster: Option<&str>| IssuerRow {
            spki: spki.into(),
            subject: format!("CN={spki}"),
            cluster: cluster.map(Into::into),
            accepted: 3,
            refused: 1,
        };
        let rows = [
            row("a", Some("west")),
            row("b", None),
            row("c", Some("west")),
            row("d", Some("unknown")),
        ];
        let want = "\
# Replace each CLUSTER-n by the name of the cluster whose CA it is.
trust:
  clusters:
    - name: \"CLUSTER-1\"
      issuers:
        # CN=b: 3 connections accepted, 1 refused
        - \"b\"
    - name: \"CLUSTER-2\"
      issuers:
        # CN=d: 3 connections accepted, 1 refused
        - \"d\"
    - name: \"west\"
      issuers:
        # CN=a: 3 connections accepted, 1 refused
        - \"a\"
        # CN=c: 3 connections accepted, 1 refused
        - \"c\"
";
        assert_eq!(trust_section(&rows), want);
    }
}
