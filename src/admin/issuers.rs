//! Issuers of peers' certificates, for the status page.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::columns;

/// Maximum number of issuers in the text.
const SHOWN: usize = 20;

/// Source of the issuers that were seen: a function of the data path.
#[derive(Clone)]
pub struct IssuerSource(Arc<dyn Fn() -> Vec<IssuerRow> + Send + Sync>);

/// Issuer.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IssuerRow {
    /// SHA-256 of the SubjectPublicKeyInfo.
    pub spki: String,
    /// Subject.
    pub subject: String,
    /// Cluster by `trust.clusters`; none without that key, or if the issuer is refused.
    pub cluster: Option<String>,
    /// Number of connections accepted since the start.
    pub accepted: u64,
    /// Number of handshakes refused because of the issuer.
    pub refused: u64,
}

impl IssuerSource {
    /// Wraps the function that returns the issuers.
    pub fn new(ask: impl Fn() -> Vec<IssuerRow> + Send + Sync + 'static) -> Self {
        Self(Arc::new(ask))
    }

    /// Returns the issuers, those with the most connections first.
    pub(super) fn rows(&self) -> Vec<IssuerRow> {
        let mut rows = self.0();
        let count = |row: &IssuerRow| row.accepted.saturating_add(row.refused);
        rows.sort_by(|one, other| {
            let order = count(other).cmp(&count(one));
            order.then_with(|| one.spki.cmp(&other.spki))
        });
        rows
    }
}

impl fmt::Debug for IssuerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Issuers")
    }
}

/// Returns the table of the issuers; empty if there are none.
pub(super) fn lines(issuers: &[IssuerRow]) -> Vec<String> {
    if issuers.is_empty() {
        return Vec::new();
    }
    let rows = issuers.iter().take(SHOWN).map(|row| {
        [
            row.spki.clone(),
            row.subject.clone(),
            row.cluster.clone().unwrap_or_else(|| "-".to_owned()),
            row.accepted.to_string(),
            row.refused.to_string(),
        ]
    });
    let header = ["SPKI SHA-256", "SUBJECT", "CLUSTER", "ACCEPTED", "REFUSED"];
    let mut lines: Vec<_> = columns::lines("  ", header, rows.collect()).collect();
    let more = issuers.len().saturating_sub(SHOWN);
    if more > 0 {
        lines.push(format!("  and {more} more, see `strait status --json`"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn istiod_5_issuers_are_a_table_with_the_busiest_first() {
        let row = |spki: &str, cluster: Option<&str>, accepted, refused| IssuerRow {
            spki: spki.into(),
            subject: format!("CN={spki}"),
            cluster: cluster.map(Into::into),
            accepted,
            refused,
        };
        let rows = vec![
            row("b", None, 1, 1),
            row("c", Some("west"), 7, 0),
            row("a", Some("east"), 2, 0),
        ];
        let issuers = IssuerSource::new(move || rows.clone());
        let lines = lines(&issuers.rows());
        let lines: Vec<_> = lines.iter().map(|line| line.trim_end()).collect();
        let want = [
            "  SPKI SHA-256  SUBJECT  CLUSTER  ACCEPTED  REFUSED",
            "  c             CN=c     west     7         0",
            "  a             CN=a     east     2         0",
            "  b             CN=b     -        1         1",
        ];
        assert_eq!(lines, want);
        let many: Vec<_> = (0..30).map(|_| row("x", None, 1, 0)).collect();
        let lines = super::lines(&many);
        assert_eq!(lines.len(), 1 + SHOWN + 1);
        assert_eq!(
            lines[SHOWN + 1],
            "  and 10 more, see `strait status --json`"
        );
        assert!(super::lines(&[]).is_empty());
    }
}
